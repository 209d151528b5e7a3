"""Do ranks bring values together exactly: uneven, empty, whole numbers beyond a float, every dtype, and errors that name both ranks?"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import allranks
from allranks.comm import values
from allranks.core.errors import AllranksError, RanksDisagree, UsageError
from support.ranks import run_outcomes, run_ranks

pytestmark = pytest.mark.ranks

SIZES = pytest.mark.parametrize("world_size", [1, 2, 3, 4])


def numbers_of(rank: int) -> Iterator[float]:
    """Uneven: rank r has r numbers, rank 0 none."""
    return (10.0 * rank + i for i in range(rank))


def sums() -> dict[str, Any]:
    r = dist.get_rank()
    return {
        "int": values.total(r + 1),
        "beyond a float": values.total(2**53 + 1),
        "bool": values.total(r % 2 == 0),
        "np bool": values.total(np.bool_(True)),
        "float": values.total(0.5),
        "int and float": values.total(1 if r == 0 else 0.5),
        "generator": values.total(numbers_of(r)),
        "empty everywhere": values.total([]),
        "0-dim": values.total(torch.tensor(r)),
        "tensor": values.total(torch.tensor([[r, 1]])),
        "bf16": values.total(torch.ones(300, dtype=torch.bfloat16).unbind()),
        "array": values.total(np.array([1, r], dtype=np.int16)),
        "list of tensors": values.total([torch.ones(2)] * r) if r or values.world_size() > 1 else None,
        "complex": values.total(1 + 2j),
        "grad": values.total(torch.tensor(1.0, requires_grad=True)),
        "dict": values.total({"b": r, "a": [0.5, 0.5]} if r else {"a": [0.5, 0.5], "b": r}),
    }


@SIZES
def test_sum_then_what_one_rank_with_all_values_would_have(world_size: int) -> None:
    every = run_ranks(world_size, sums)
    ranks, n = range(world_size), world_size
    expected: dict[str, Any] = {
        "int": n * (n + 1) // 2,
        "beyond a float": n * (2**53 + 1),
        "bool": sum(r % 2 == 0 for r in ranks),
        "np bool": n,
        "float": 0.5 * n,
        "int and float": 1 + 0.5 * (n - 1) if n > 1 else 1,
        "generator": sum(x for r in ranks for x in numbers_of(r)),
        "empty everywhere": 0,
        "0-dim": sum(ranks),
        "tensor": [[sum(ranks), n]],
        "bf16": 300.0 * n,  # in bfloat16 it would stay at 256
        "array": [n, sum(ranks)],
        "list of tensors": [float(sum(ranks))] * 2 if n > 1 else None,
        "complex": (1 + 2j) * n,
        "grad": float(n),
        "dict": {"a": float(n), "b": sum(ranks)},
    }
    for found in every:
        plain = {k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in found.items()}
        assert plain == expected
        assert {k: type(v) for k, v in plain.items()} == {k: type(v) for k, v in expected.items()}


def means() -> dict[str, Any]:
    r = dist.get_rank()
    nan = float("nan")
    return {
        "number": values.average(float(r)),
        "weighted": values.average(float(r), weight=r + 1),
        "generator": values.average(numbers_of(r)),
        "uneven with weights": values.average([float(r)] * r, weight=[2] * r),
        "weight 0 hides NaN": values.average([nan, 1.0], weight=[0, 1]),
        "one rank has weight 0": values.average(nan if r else 2.0, weight=0 if r else 4),
        "NaN that counts": values.average(nan if r == 0 else 1.0),
        "no weight at all": values.average(1.0, weight=0),
        "empty everywhere": values.average([]),
        "tensor": values.average(torch.tensor([r, 1])),
        "tensor weight": values.average([1.0, 3.0], weight=torch.tensor(2)),
        "tensor weights": values.average([1.0, 3.0], weight=torch.tensor([3, 1])),
        "int": values.average([1, 2]),
        "bool": values.average([True, False]),
        "complex": values.average(1j),
        "dict": values.average({"loss": float(r), "hits": [1, 0]}, weight=None),
        "dict with weights": values.average({"a": [1.0, nan], "b": [2.0, 4.0]}, weight=iter([1, 0])),
    }


@SIZES
def test_mean_then_what_one_rank_with_all_values_would_have(world_size: int) -> None:
    every = run_ranks(world_size, means)
    ranks, n = range(world_size), world_size
    numbers = [x for r in ranks for x in numbers_of(r)]
    expected = {
        "number": sum(ranks) / n,
        "weighted": sum(r * (r + 1) for r in ranks) / sum(r + 1 for r in ranks),
        "generator": sum(numbers) / len(numbers) if numbers else math.nan,
        "uneven with weights": sum(r * r for r in ranks) / sum(ranks) if n > 1 else math.nan,
        "weight 0 hides NaN": 1.0,
        "one rank has weight 0": 2.0,
        "NaN that counts": math.nan,
        "no weight at all": math.nan,
        "empty everywhere": math.nan,
        "tensor": [sum(ranks) / n, 1.0],
        "tensor weight": 2.0,
        "tensor weights": 1.5,
        "int": 1.5,
        "bool": 0.5,
        "complex": 1j,
        "dict": {"loss": sum(ranks) / n, "hits": 0.5},
        "dict with weights": {"a": 1.0, "b": 2.0},
    }
    for found in every:
        plain = {k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in found.items()}
        for name, value in expected.items():
            assert plain[name] == pytest.approx(value, nan_ok=True, rel=1e-15), name


DTYPES = [torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int16, torch.uint8, torch.bool]
DTYPES += [torch.complex64, torch.uint16]


def gathers() -> dict[str, Any]:
    r = dist.get_rank()
    return {
        "uneven": torch.cat(values.gather_rows(torch.full((r, 2), r))),
        "empty everywhere": torch.cat(values.gather_rows(torch.empty(0, 3))).shape,
        "nothing in a row": torch.cat(values.gather_rows(torch.empty(r + 1, 0))).shape,
        "0-dim": torch.cat(values.gather_rows(torch.tensor(r))),
        "strided": torch.cat(values.gather_rows((torch.arange(6).reshape(2, 3) + 10 * r).T)),
        "dtypes": [torch.cat(values.gather_rows(torch.tensor([r % 2]).to(d))).dtype for d in DTYPES],
        "exact": torch.cat(values.gather_rows(torch.tensor([2**62 + r]))),
        "grad": torch.cat(values.gather_rows(torch.ones(1, requires_grad=True))).requires_grad,
        "objects": values.gather_objects({"rank": r, "name": "x" * (r * 1000)}),
        "any": (values.any_rank(r == 0), values.any_rank(False), values.any_rank(torch.tensor(r == 0))),
        "all": (values.every_rank(True), values.every_rank(r == 0), values.every_rank([])),
        "agree": (values.from_rank_zero(f"from {r}"), values.from_rank_zero(None if r else {"lr": 0.1})),
    }


@SIZES
def test_gather_then_every_rank_has_all_rows_in_order_of_rank(world_size: int) -> None:
    n = world_size
    for found in run_ranks(n, gathers):
        assert found["uneven"].tolist() == [[r, r] for r in range(n) for _ in range(r)]
        assert found["empty everywhere"] == (0, 3)
        assert found["nothing in a row"] == (n * (n + 1) // 2, 0)
        assert found["0-dim"].tolist() == list(range(n))
        strided = [[10 * r + i, 10 * r + 3 + i] for r in range(n) for i in range(3)]
        assert found["strided"].tolist() == strided
        assert found["dtypes"] == DTYPES
        assert found["exact"].tolist() == [2**62 + r for r in range(n)]
        assert not found["grad"]
        assert found["objects"] == [{"rank": r, "name": "x" * (r * 1000)} for r in range(n)]
        assert found["any"] == (True, False, True)
        assert found["all"] == (True, n == 1, False)
        assert found["agree"] == ("from 0", {"lr": 0.1})


# -- what ranks cannot bring together ----------------------------------------------------------------------------------------


def disagreements() -> list[str]:
    r = dist.get_rank()
    calls = [
        lambda: values.total(torch.ones(2 + r), "sum"),
        lambda: values.total(1.0 if r == 0 else torch.ones(1), "sum"),
        lambda: values.average(torch.ones(2, 2 + r), name="mean"),
        lambda: values.gather_rows(torch.ones(1, 2 + r)),
        lambda: values.gather_rows(torch.ones(1) if r == 0 else torch.ones(1, dtype=torch.int64)),
        lambda: values.gather_rows(torch.ones(1) if r == 0 else torch.ones(1, 1)),
        lambda: values.total({"a": 1, "b": 2} if r == 0 else {"a": 1}, "sum"),
        lambda: values.average({"a": 1} if r == 0 else {"a": 1, "c": 2}),
    ]
    said = []
    for call in calls:
        with pytest.raises(RanksDisagree) as caught:
            call()
        assert caught.value.code == "AR161" and caught.value.fix
        said.append(caught.value.what)
    return said


def test_values_when_shapes_or_keys_differ_then_every_rank_names_both() -> None:
    first, second = run_ranks(2, disagreements)
    assert (
        first
        == second
        == [
            "sum: rank 0 gives float64[2], rank 1 gives float64[3]",
            "sum: rank 0 gives float64[], rank 1 gives float64[1]",
            "mean: rank 0 gives float64[2, 2], rank 1 gives float64[2, 3]",
            "gather: rank 0 gives float32[1, 2], rank 1 gives float32[1, 3]",
            "gather: rank 0 gives float32[1], rank 1 gives int64[1]",
            "gather: rank 0 gives float32[1], rank 1 gives float32[1, 1]",
            "sum: only rank 0 of the ranks 0 and 1 has the entry 'b'",
            "mean: only rank 1 of the ranks 0 and 1 has the entry 'c'",
        ]
    )


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda: values.total("abc"), "cannot add up 'abc', which is a value of type str"),
        (lambda: values.total(None), "cannot add up 'None', which is a value of type NoneType"),
        (lambda: values.total([1, "a"]), "cannot add up 'a', which is a value of type str"),
        (lambda: values.total(2**70), f"cannot add up '{2**70}', which is a value of type int"),
        (lambda: values.total(np.array([object()])), "cannot add up '[<object object at"),
        (
            lambda: values.total([torch.ones(2), torch.ones(3)]),
            "cannot add a value of shape (3,) to one of shape (2,)",
        ),
        (lambda: values.average(object()), "cannot add up '<object object at"),
        (lambda: values.average([1, 2], weight=[1]), "2 values, but 1 weights"),
        (
            lambda: values.average(torch.ones(3), weight=torch.ones(3)),
            "several weights for one value of shape (3,)",
        ),
    ],
)
def test_values_when_they_cannot_be_added_then_said_by_their_own_rank(call: Any, what: str) -> None:
    with pytest.raises(UsageError) as caught:
        call()
    assert caught.value.code == "AR160" and caught.value.what.startswith(what)
    assert caught.value.fix


def disagree_in_a_run() -> None:
    with allranks.start() as run:
        if run.rank == 1:
            run.sum("nothing to add")
        run.sum(1)


def test_sum_when_one_rank_gives_nonsense_then_the_others_hear_of_it() -> None:
    first, second = run_outcomes(2, disagree_in_a_run, init=False)
    assert isinstance(second.error, UsageError), second.story()
    assert isinstance(first.error, AllranksError), first.story()
    host = socket.gethostname()
    assert first.error.what == (
        f"rank 1 on host {host} failed first: UsageError: AR160 cannot add up 'nothing to add', which is a value of type str"
    )


def decide_in_a_run() -> tuple[Any, ...]:
    with allranks.start() as run:
        r = run.rank
        rows = run.gather([torch.full((2,), r)] * r)
        names = run.gather([f"rank {r}"] * r)
        return (
            run.sum([r]),
            run.mean({"a": r}),
            rows.tolist(),
            names,
            run.any(r),
            run.all(r),
            run.agree(os.getpid()),
        )


def test_run_when_it_brings_values_together_then_the_same_on_every_rank() -> None:
    every = run_ranks(3, decide_in_a_run, init=False)
    assert every[0] == every[1] == every[2]
    assert every[0][:6] == (3, {"a": 1.0}, [1] * 2 + [2] * 4, ["rank 1", "rank 2", "rank 2"], True, False)
