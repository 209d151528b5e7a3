"""Does the record hold the first loss that was not finite, and fingerprints of what DDP keeps equal?"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from allranks.record import compat, fingerprints, losses, process, states
from allranks.record import layout as at
from allranks.record.page import read_page
from allranks.record.writer import Writer


class Group:
    def _get_sequence_number_for_group(self) -> int:
        return 7


GROUP = Group()


@pytest.fixture
def writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Writer:
    """A page of its own for what this process writes, which is put back as it was."""
    made = Writer()
    made.open(str(tmp_path))
    stem = (made.path or "").removesuffix(at.SUFFIX)
    for module in (losses, fingerprints):
        monkeypatch.setattr(module, "_writer", made)
    monkeypatch.setattr(process, "side_path", lambda suffix: stem + suffix)
    for name in ("which", "_looked", "_before"):
        monkeypatch.setattr(losses, name, 0)
    monkeypatch.setattr(states, "is_quick", False)
    for name, value in {
        "next_step": 1,
        "_last": 0,
        "_since": (0, 0),
        "_cost_ns": 0,
        "_took_ns": 0,
        "_names": [],
        "_slot": 0,
        "_file": None,
    }.items():
        monkeypatch.setattr(fingerprints, name, value)
    monkeypatch.setattr(states, "is_synchronised", True)
    monkeypatch.setattr(states, "world", GROUP)
    monkeypatch.setattr(compat, "beside", {})
    return made


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Iterator[nn.Module]:
    """A model that looks as if it were in a DDP of all ranks."""
    module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    ddp = SimpleNamespace(module=module, process_group=GROUP, require_backward_grad_sync=True)
    monkeypatch.setattr(states, "known_replicas", lambda: [ddp])
    yield module


@pytest.mark.parametrize(
    ("value", "kind"), [(float("nan"), "nan"), (float("inf"), "inf"), (-float("inf"), "-inf")]
)
def test_loss_when_not_finite_then_step_line_and_kind_are_noted_once(
    writer: Writer, value: float, kind: str
) -> None:
    line = writer.string("/a/train.py:12 main") << 8
    for loss in (1.0, value, -1.0, float("nan")):
        if losses.is_due():
            losses.look((torch.tensor(loss),), line)
        writer.end_step()
    found = read_page(writer.path or "").not_finite
    assert found is not None
    assert (found.step, found.kind, found.line, found.sound) == (2, kind, "/a/train.py:12 main", 1)


def test_loss_when_steps_are_quick_then_some_are_looked_at_and_the_last_sound_one_known(
    writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(states, "is_quick", True)
    writer.may_be_light = True
    looked: list[int] = []
    for step in range(200):
        looked += [step + 1] * losses.is_due()
        for _ in range(2):  # micro-batches
            if losses.is_due():
                losses.look((torch.tensor(float("nan") if step >= 70 else 1.0),), 0)
        writer.end_step()
    found = read_page(writer.path or "").not_finite
    assert found is not None
    assert len(looked) < 20
    assert (found.step, found.sound) == (min(k for k in looked if k > 70), max(k for k in looked if k <= 70))


@pytest.mark.parametrize(
    "args",
    [
        (),
        (torch.full((3,), float("nan")),),
        ([torch.tensor(1.0)],),
        (torch.empty((), device="meta"),),
        (1.0,),
    ],
)
def test_loss_when_it_is_no_single_value_then_nothing_is_noted(
    writer: Writer, args: tuple[object, ...]
) -> None:
    losses.look(args, 0)
    assert read_page(writer.path or "").not_finite is None


def test_loss_when_of_several_values_or_complex_then_quick_steps_are_looked_at_no_more_often_and_ticks_go_on(
    writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(states, "is_quick", True)
    for loss in (torch.ones(3), torch.ones(2).to_sparse(), torch.ones((), dtype=torch.complex64)):
        losses.which = losses.EVERY
        losses.look((loss,), 0)
        assert losses.which == losses.SOME
        writer.flush()  # as the thread that ticks does
    times = read_page(writer.path or "").times
    assert times is not None and times.loss is None


def test_fingerprint_when_one_bit_changes_then_hash_and_sum_of_that_parameter_change(
    writer: Writer, model: nn.Module
) -> None:
    fingerprints.take(1)
    fingerprints.take(2)
    with torch.no_grad():
        model[0].weight[1, 2] = torch.nextafter(model[0].weight[1, 2], torch.tensor(9.0))
        model[1].running_mean += 1  # a buffer: each rank has its own
    fingerprints.take(3)
    one, two, three = read_page(writer.path or "").checks
    assert one.hash == two.hash != three.hash
    assert (three.step, three.seq) == (3, 7)
    names, sums = fingerprints.read_sums(writer.path or "")
    assert names == ("0.weight", "0.bias", "1.weight", "1.bias")
    assert [a == b for a, b in zip(sums[2].sums, sums[3].sums, strict=True)] == [False, True, True, True]
    assert [b - a for a, b in zip(sums[2].changes, sums[3].changes, strict=True)] == [1, 0, 0, 0]


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.float16, torch.float32, torch.complex64]
)
def test_fingerprint_when_of_any_type_then_taken(
    writer: Writer, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    module = nn.ParameterList([nn.Parameter(torch.ones(3, 2, dtype=dtype).t())])
    ddp = SimpleNamespace(module=module, process_group=GROUP, require_backward_grad_sync=True)
    monkeypatch.setattr(states, "known_replicas", lambda: [ddp])
    fingerprints.take(1)
    assert len(read_page(writer.path or "").checks) == 1


def test_fingerprint_when_a_step_followed_a_backward_under_no_sync_then_never_again(
    writer: Writer, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    fingerprints.take(1)
    monkeypatch.setattr(states, "is_synchronised", False)
    fingerprints.take(2)
    fingerprints.take(3)
    assert [check.step for check in read_page(writer.path or "").checks] == [1]
    assert fingerprints.next_step == states.NEVER


def test_fingerprint_when_optimizers_step_inside_backward_then_never(
    writer: Writer, model: nn.Module
) -> None:
    fingerprints.take(1, is_in_backward=True)
    assert read_page(writer.path or "").checks == ()
    assert fingerprints.next_step == states.NEVER


def test_fingerprint_when_the_cost_is_known_then_steps_are_a_power_of_two_apart(
    writer: Writer, model: nn.Module
) -> None:
    step, taken = 0, []
    while len(taken) < 4:
        step += 1
        if step >= fingerprints.next_step:
            fingerprints.take(step)
            taken.append(step)
    periods = [fingerprints.next_step - taken[-1], taken[-1] - taken[-2]]
    assert taken[:2] == [1, 2]
    assert taken[-1] % (taken[-1] & -taken[-1]) == 0
    assert all(period >= 2 for period in periods)


@pytest.mark.parametrize("took_ms", [(12.0, 0.3), (12.0, 0.3, 0.3, 20.0), (12.0, 0.3, 20.0, 0.3)])
def test_fingerprint_when_one_took_long_then_the_next_is_not_put_off(
    writer: Writer, model: nn.Module, monkeypatch: pytest.MonkeyPatch, took_ms: tuple[float, ...]
) -> None:
    times: list[int] = []
    monkeypatch.setattr(fingerprints, "monotonic_ns", lambda: times.pop(0))
    step, now_ms, step_ms = 0, 0.0, 12
    for took in took_ms:
        now_ms += (fingerprints.next_step - step) * step_ms
        step = fingerprints.next_step
        times += [int(now_ms * 1e6), int((now_ms + took) * 1e6)]
        now_ms += took
        fingerprints.take(step)
    assert times == [] and 300 <= (fingerprints.next_step - step) * step_ms < 1000


@pytest.mark.parametrize(
    ("cost_ms", "is_quick", "apart_s"),
    [(0.02, True, 0.2), (0.3, True, 0.6), (0.8, True, 1.0), (2.0, True, 2.0), (0.3, False, 0.3)],
)
def test_fingerprint_when_the_cost_is_known_then_quick_steps_are_a_second_apart_at_the_most_for_the_smaller_share(
    monkeypatch: pytest.MonkeyPatch, cost_ms: float, is_quick: bool, apart_s: float
) -> None:
    monkeypatch.setattr(states, "is_quick", is_quick)
    monkeypatch.setattr(fingerprints, "_cost_ns", int(cost_ms * 1e6))
    period = fingerprints._period(1_000_000)
    assert 1000 * apart_s <= period < 2000 * apart_s


def test_fingerprint_when_steps_become_slower_then_the_next_does_not_wait_for_as_many_of_them(
    writer: Writer, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0
    monkeypatch.setattr(fingerprints, "monotonic_ns", lambda: now)
    monkeypatch.setattr(states, "is_quick", True)
    for step in (1, 2048):  # of 0.2 ms
        now, writer.light.syncs = step * 200_000, step
        fingerprints.take(step)
    assert fingerprints.next_step == 3072
    now, writer.light.syncs, states.is_quick = now + 2_000_000_000, 2090, False
    fingerprints.slower(50_000_000)
    assert fingerprints.next_step == 2092
    now, writer.light.syncs = now + 100_000_000, 2092
    fingerprints.take(2092)
    assert fingerprints.next_step == 2096  # and not as if the quick ones before still counted
    fingerprints.slower(50_000_000)
    assert fingerprints.next_step == 2096
    now, writer.light.syncs = now + 200_000_000, 2096
    fingerprints.slower(50_000_000)
    fingerprints.next_step = 2096  # due as it is found that they are slower
    fingerprints.take(2096)
    assert fingerprints.next_step == 2100


def hook_of(module: str) -> object:
    def hook(state: object, bucket: object) -> None: ...

    hook.__module__ = module
    return hook


@pytest.mark.parametrize(
    ("module", "keeps"),
    [
        ("torch.distributed.algorithms.ddp_comm_hooks.default_hooks", True),
        ("torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook", False),
        ("train", False),
        ("allranks.wrap.reducer", True),
    ],
)
def test_replica_when_a_hook_sends_gradients_then_only_known_ones_keep_ranks_equal(
    module: str, keeps: bool
) -> None:
    ddp = SimpleNamespace(
        process_group=GROUP, require_backward_grad_sync=True, _comm_hooks=[(hook_of(module), None)]
    )
    assert compat.keeps_equal(ddp, GROUP) is keeps


def test_replica_when_of_a_part_of_the_ranks_then_not_compared() -> None:
    ddp = SimpleNamespace(process_group=object(), require_backward_grad_sync=True)
    assert not compat.keeps_equal(ddp, GROUP)
