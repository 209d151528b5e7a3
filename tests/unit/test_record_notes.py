"""Does a process note what its loaders, generators, schedulers and gradients do, once, and without touching them?"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, _utils
from torch.utils.data.dataloader import _BaseDataLoaderIter
from torch.utils.data.distributed import DistributedSampler

from allranks.record import (
    averaging,
    compat,
    draws,
    gradients,
    losses,
    notes,
    origin,
    passes,
    schedulers,
    states,
    taken,
    watched,
)
from allranks.record import layout as at
from allranks.record.writer import Writer

Noted = list[dict[str, Any]]


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Noted]:
    """What is noted, in a list, by a process that has noted nothing yet."""
    found: Noted = []
    monkeypatch.setattr(notes, "_write", lambda path, kind, values: found.append({"kind": kind, **values}))
    writer = Writer()
    writer.words[at.W_WORLD_SIZE] = 2
    for module in (passes, draws, schedulers, gradients, losses, averaging):
        monkeypatch.setattr(module, "_writer", writer)
    monkeypatch.setattr(states, "is_quick", False)
    monkeypatch.setattr(losses, "which", losses.EVERY)
    yield found
    for repair in (passes, draws, schedulers, gradients, watched, averaging):
        repair._after_fork()
    passes._leaked = False


def step() -> None:
    passes._writer.end_step()


@pytest.fixture
def marked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_BaseDataLoaderIter, "_reset", _BaseDataLoaderIter._reset)
    taken.mark_indices(_BaseDataLoaderIter)


def walk(loader: DataLoader[Any], line: str = "train.py:3 main", *, training: bool = True) -> int:
    """One pass, as the probe sees it."""
    iterator = iter(loader)
    followed, indices = passes.begin(loader, line, 0), taken.indices_of(iterator)
    count = 0
    while True:
        try:
            next(iterator)
        except StopIteration:
            if followed is not None:
                passes.ended(followed)
            return count
        count += 1
        followed = passes.handed(followed, indices, count)
        if training:
            step()


def samples(count: int = 64) -> TensorDataset:
    return TensorDataset(torch.arange(count * 4.0).reshape(count, 4), torch.arange(count) % 4)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.usefixtures("marked")
def test_pass_when_epochs_are_not_set_then_the_same_beginning_is_noted(noted: Noted, workers: int) -> None:
    data = samples()
    sampler = DistributedSampler(data, num_replicas=2, rank=0)
    loader = DataLoader(data, batch_size=4, sampler=sampler, num_workers=workers)
    assert walk(loader) == walk(loader) == 8
    one, two = (n for n in noted if n["kind"] == "pass")
    assert one["hash"] == two["hash"]
    assert (one["training"], one["num_replicas"], one["share"], one["shuffle"]) == (True, 2, 32, True)
    sampler.set_epoch(1)
    walk(loader)
    assert [n["hash"] for n in noted if n["kind"] == "pass"][2] != one["hash"]
    assert next(n for n in noted if n["kind"] == "seen")["samples"] == 32


@pytest.mark.usefixtures("marked")
def test_pass_when_loaders_are_made_anew_then_they_are_one_loader(noted: Noted) -> None:
    data = samples()
    for _ in range(2):
        walk(DataLoader(data, batch_size=4, shuffle=True))
    assert [(n["loader"], n["number"]) for n in noted if n["kind"] == "pass"] == [(1, 1), (1, 2)]


@pytest.mark.usefixtures("marked")
def test_pass_when_it_is_late_in_the_job_then_nothing_is_noted(noted: Noted) -> None:
    loader = DataLoader(samples(), batch_size=4)
    for _ in range(6):
        walk(loader)
    assert sum(n["kind"] == "pass" for n in noted) == passes.NOTED_PASSES


@pytest.mark.usefixtures("marked")
def test_subsets_when_they_overlap_then_noted_and_else_not(noted: Noted) -> None:
    data = samples()
    for evaluated in (range(40, 64), range(30, 50)):
        walk(DataLoader(Subset(data, range(40)), batch_size=8), "train.py:3 main")
        walk(
            DataLoader(Subset(data, evaluated), batch_size=8), f"train.py:{evaluated[0]} main", training=False
        )
    leaks = [n for n in noted if n["kind"] == "leak"]
    assert [(n["both"], n["evaluate"], n["line"]) for n in leaks] == [(10, 20, "train.py:30 main")]


@pytest.mark.usefixtures("marked")
def test_evaluation_when_the_sampler_pads_then_what_followed_is_noted(noted: Noted) -> None:
    data = samples(10)
    sampler = DistributedSampler(data, num_replicas=3, rank=2, shuffle=False)
    walk(DataLoader(data, batch_size=2, sampler=sampler), training=False)
    writer = passes._writer
    writer.exit_collective(writer.enter_collective(writer.string("all_reduce"), numel=2))
    passes.at_end()
    found = next(n for n in noted if n["kind"] == "evaluated")
    assert (found["ops"], found["padded"], found["sampler_rank"]) == ([["all_reduce", 2]], 2, 2)


class Noisy(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(2) + index


@pytest.mark.parametrize(("data", "draws_from"), [(Noisy(), ["torch"]), (samples(), None)])
def test_randomness_when_reading_draws_then_the_state_before_is_noted(
    noted: Noted, data: Dataset[Any], draws_from: list[str] | None
) -> None:
    fetch = _utils.fetch._MapDatasetFetcher.fetch
    fetcher = _utils.fetch._MapDatasetFetcher(data, True, list, False)
    assert len(draws.watched(fetch, fetcher, [1, 2])) == 2
    assert [sorted(n["states"]) for n in noted] == ([draws_from] if draws_from else [])


def test_stream_when_read_then_its_first_batches_are_noted_by_class(noted: Noted) -> None:
    fetcher = _utils.fetch._IterableDatasetFetcher(samples(), True, list, False)
    read = draws.watching(_utils.fetch._IterableDatasetFetcher.fetch)
    for _ in range(draws.LOOKS + 2):
        read(fetcher, [0, 1])
    first = [n for n in noted if n["kind"] == "first"]
    assert [(n["dataset"], n["number"]) for n in first] == [
        ("TensorDataset", k + 1) for k in range(draws.LOOKS)
    ]
    assert len({n["hash"] for n in first}) == draws.LOOKS


@pytest.mark.parametrize(
    ("batch", "is_known"),
    [
        (torch.arange(4.0), True),
        ([torch.arange(3), "text"], True),
        ({"x": 1.5}, True),
        (torch.zeros(0), False),
        (object(), False),
    ],
)
def test_content_when_of_plain_values_then_equal_batches_are_equal(batch: Any, is_known: bool) -> None:
    value = draws.content(batch)
    assert (value is not None) is is_known
    if is_known:
        assert value == draws.content(copy.deepcopy(batch))


@pytest.mark.parametrize(("per_step", "is_told"), [(1, False), (2, True), (3, False)])
def test_scheduler_when_stepped_once_per_rank_then_noted(noted: Noted, per_step: int, is_told: bool) -> None:
    class Scheduler:
        optimizer = None

        def step(self) -> None: ...

    module = SimpleNamespace(LRScheduler=Scheduler)
    schedulers.mark_schedulers(module)
    scheduler = Scheduler()
    scheduler.step()  # its constructor
    for _ in range(8):
        step()
        for _ in range(per_step):
            scheduler.step()
    assert [n["kind"] for n in noted] == (["scheduler"] if is_told else [])
    assert vars(scheduler) == {}  # what is saved with it is the user's


# --- numbers ---


@pytest.fixture
def ddp(noted: Noted) -> Any:
    """Looks like a DDP whose forward was called; `noted` watches it."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    found = nn.ParameterDict()
    object.__setattr__(found, "module", module)
    return found


def backward(ddp: Any, x: torch.Tensor, spoil: bool) -> torch.Tensor:
    out = ddp.module(x)
    origin.remember(ddp, (x,), out)
    return out.square().mean() + ((out * 0).square().sum().sqrt() if spoil else 0)


def test_gradient_when_not_finite_and_stepped_with_then_noted_once(noted: Noted, ddp: Any) -> None:
    gradients.watch(ddp)
    for number in range(3):
        ddp.module.zero_grad()
        backward(ddp, torch.ones(2, 4), number > 0).backward()
        assert gradients.is_waiting() == (number > 0) or not gradients.is_on
        if gradients.is_waiting():
            gradients.stepping()
        step()
    (found,) = noted
    assert (found["kind"], found["step"], found["bad"][0], found["num_bad"]) == ("gradient", 2, "2.bias", 4)


def test_gradient_when_it_was_looked_at_then_no_hook_is_left_for_torch_to_ask(
    noted: Noted, ddp: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(states, "is_quick", True)
    watched = ddp.module[0].bias
    gradients.watch(ddp)
    assert watched._backward_hooks
    backward(ddp, torch.ones(2, 4), False).backward()
    gradients.settle()
    assert watched._backward_hooks is None
    kept = watched.register_hook(lambda gradient: gradient)  # the user's own
    gradients.settle()
    assert list(watched._backward_hooks) == [kept.id] and noted == []
    gradients.prepare()
    assert len(watched._backward_hooks) == 2
    backward(ddp, torch.ones(2, 4), False).backward()
    gradients.settle()
    assert list(watched._backward_hooks) == [kept.id] and gradients._unhook is None


def test_gradient_when_mended_or_the_step_is_left_out_then_silent(noted: Noted, ddp: Any) -> None:
    gradients.watch(ddp)
    backward(ddp, torch.ones(2, 4), True).backward()
    step()  # of another optimizer: this gradient was of a step before
    gradients.stepping()
    ddp.module.zero_grad()
    backward(ddp, torch.ones(2, 4), True).backward()
    for parameter in ddp.module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    gradients.stepping()
    assert noted == []


def test_gradient_when_watched_then_the_model_is_saved_and_copied_without_a_warning(
    ddp: Any, tmp_path: Path
) -> None:
    gradients.watch(ddp)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        copy.deepcopy(ddp.module)
        torch.save(ddp.module, tmp_path / "whole.pt")
        torch.save(list(ddp.module.parameters()), tmp_path / "list.pt")


def test_origin_when_a_sample_is_broken_then_its_row_is_found(ddp: Any) -> None:
    x = torch.ones(4, 4)
    x[2, 1] = float("nan")
    assert origin.find(backward(ddp, x, False)) == {"place": "input", "rows": [2], "of": 4}


def test_origin_when_a_parameter_is_broken_then_it_is_named(ddp: Any) -> None:
    with torch.no_grad():
        ddp.module[2].bias[0] = float("inf")
    assert origin.find(backward(ddp, torch.ones(2, 4), False))["name"] == "2.bias"


def test_origin_when_the_loss_function_made_it_then_the_operation_is_named(ddp: Any) -> None:
    x = torch.ones(2, 4)
    out = ddp.module(x)
    origin.remember(ddp, (x,), out)
    found = origin.find(((out * 0 - 1).log() * out).sum())
    assert (found["place"], found["operation"], found["after"]) == ("loss", "log", "2.bias")
    shifted = origin.find((out * torch.tensor(float("nan"))).sum())
    assert shifted["operation"] == "a value that mul was given from outside the model"


def test_origin_when_nothing_is_known_then_nothing_is_said() -> None:
    assert origin.find(None) == {}
    assert origin.find(torch.tensor(float("nan"))).get("operation") is None


def test_loss_when_not_finite_then_the_samples_of_the_batch_are_noted(noted: Noted, ddp: Any) -> None:
    x = torch.ones(4, 4)
    x[2, 1] = float("nan")
    loss = backward(ddp, x, False)
    passes.batch = [40, 41, 42, 43]
    losses.look((loss,), 0)
    losses.look((loss,), 0)
    passes.batch = None
    (found,) = noted
    assert (found["samples"], found["is_row"], found["step"]) == ([42], True, 1)


class Group:
    def _get_sequence_number_for_group(self) -> int:
        return 7


@pytest.fixture
def wrapped(noted: Noted, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A DDP of all ranks, built and not yet called."""
    group = Group()
    monkeypatch.setattr(states, "world", group)
    monkeypatch.setattr(compat, "beside", {})
    monkeypatch.setattr(states, "replicas", {})
    monkeypatch.setattr(
        averaging, "_lines", SimpleNamespace(here=lambda: averaging._writer.string("train.py:9 main") << 8)
    )
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    found = SimpleNamespace(
        module=module, process_group=group, require_backward_grad_sync=True, find_unused_parameters=True
    )
    averaging._built.append(lambda: found)
    return found


def test_averaging_when_the_module_inside_is_called_then_the_line_is_noted(
    noted: Noted, wrapped: Any
) -> None:
    for _ in range(6):
        wrapped.module(torch.ones(2, 4)).sum().backward()
        step()
        averaging.look()
    (found,) = noted
    assert (found["why"], found["line"], found["step"]) == ("module", "train.py:9 main", 3)
    assert found["sums"][0][0] == "0.weight"


def test_averaging_when_the_script_averages_itself_then_silent(noted: Noted, wrapped: Any) -> None:
    writer = averaging._writer
    for _ in range(6):
        wrapped.module(torch.ones(2, 4)).sum().backward()
        writer.exit_collective(writer.enter_collective(writer.string("all_reduce"), numel=16))
        step()
        averaging.look(is_end=True)
    assert noted == []


def test_averaging_when_under_no_sync_then_only_at_the_end(noted: Noted, wrapped: Any) -> None:
    states.replicas[id(wrapped)] = SimpleNamespace(syncs=0)  # type: ignore[assignment]
    for _ in range(6):
        wrapped.module(torch.ones(2, 4)).sum().backward()
        step()
        averaging.look()
    assert noted == []
    averaging.look(is_end=True)
    assert noted[0]["why"] == "no_sync"


def test_parameters_when_one_never_gets_a_gradient_then_noted_once(noted: Noted, wrapped: Any) -> None:
    for number in range(1, 9):
        wrapped.module[0](torch.ones(2, 4)).sum().backward()
        watched.look(number * 8, number, [wrapped])
    never = [n for n in noted if n["kind"] == "never"]
    assert [(n["names"], n["looks"], n["flag"]) for n in never] == [(["1.bias", "1.weight"], 6, True)]


def test_buffers_when_they_are_state_then_noted_and_others_not(noted: Noted, wrapped: Any) -> None:
    wrapped.module.register_buffer("codebook", torch.ones(8))
    wrapped.module.register_buffer("count", torch.ones(1))
    wrapped.module.register_buffer("cache", torch.ones(8), persistent=False)
    wrapped.module.append(nn.BatchNorm1d(16))
    watched.look(4, 9, [wrapped])
    (found,) = (n for n in noted if n["kind"] == "buffers")
    assert [row[0] for row in found["rows"]] == ["codebook"]
