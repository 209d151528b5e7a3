"""Does an error of the record's own, or of what it looks at, leave the user's job alone; and is it said once?"""

from __future__ import annotations

import gc
import io
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from allranks.record import averaging, compat, draws, files, gradients, notes, passes, states, taken
from allranks.record import layout as at
from allranks.record.writer import Writer


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that has noted and said nothing yet."""
    monkeypatch.setattr(notes, "_write", lambda path, kind, values: None)
    monkeypatch.setattr(compat, "_has_said", False)
    writer = Writer()
    writer.words[at.W_WORLD_SIZE] = 2
    for module in (passes, draws, gradients, averaging):
        monkeypatch.setattr(module, "_writer", writer)
    yield
    for module in (passes, draws, gradients, averaging):
        module._after_fork()


def broken(*_: Any, **__: Any) -> Any:
    raise RuntimeError("of our own")


def samples() -> TensorDataset:
    return TensorDataset(torch.arange(64.0))


def test_pass_when_its_note_fails_then_batches_come_and_it_is_said_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(passes, "_note_pass", broken)
    loader = DataLoader(samples(), batch_size=8)
    for _ in range(2):
        followed = passes.begin(loader, "train.py:3 main", 0)
        assert followed is not None
        indices = taken.Taken()
        for k in range(3):
            indices.add([k])
        assert [passes.handed(followed, indices, k + 1) for k in range(3)] == [followed, followed, None]
        passes.ended(followed)
    assert capsys.readouterr().err.count("the job is not touched") == 1


def test_draws_when_their_note_fails_then_the_batch_comes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(draws, "_note_draws", broken)
    fetcher = SimpleNamespace(dataset=samples())
    for _ in range(3):
        assert draws.watched(lambda fetcher, indices: indices, fetcher, [1, 2]) == [1, 2]
    assert capsys.readouterr().err.count("[allranks]") == 1


class Untold(Dataset[int]):
    """Looking at it fails."""

    asked = 0

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        type(self).asked += 1
        raise RuntimeError("the user's own")

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return index


def test_data_set_when_it_cannot_be_described_then_it_is_not_tried_again_in_each_pass() -> None:
    data = Untold()
    for _ in range(4):
        passes.begin(DataLoader(data, batch_size=4), "train.py:3 main", 0)
    assert Untold.asked == 1


class Stream(IterableDataset[int]):
    """One that says less than it has."""

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


class Angry(Dataset[int]):
    def __len__(self) -> int:
        raise RuntimeError("the user's own")

    def __getitem__(self, index: int) -> int:
        return index


def test_length_when_asked_for_then_the_loader_does_not_warn_and_errors_are_left_out() -> None:
    loader = DataLoader(Stream(), batch_size=1)
    assert compat.loader_length(loader) == 2
    assert len(list(loader)) == 4  # warnings are errors in tests
    assert compat.loader_length(DataLoader(Angry(), sampler=range(3), batch_sampler=None)) in (-1, 3)
    assert compat.loader_length(object()) == -1


def test_file_when_its_path_cannot_be_told_then_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_note", broken)
    assert files._noting(lambda thing, f: f, "saved", 1)("thing", "a.pt") == "a.pt"


class Model(SimpleNamespace):
    """Looks like a DDP, and can be held weakly."""


def test_model_when_it_is_gone_then_not_held_and_the_next_one_is_watched() -> None:
    first = Model(module=nn.Linear(4, 4))
    gradients.watch(first)
    held = [weakref.ref(first), weakref.ref(first.module.weight)]
    del first
    gc.collect()
    assert [known() for known in held] == [None, None]
    second = Model(module=nn.Linear(4, 4))
    gradients.watch(second)
    (second.module(torch.ones(1, 4)).sum() * torch.nan).backward()
    assert gradients.is_waiting()


@pytest.fixture
def stray(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A DDP whose module is trained beside it, as seen after the first such step."""
    group = SimpleNamespace(_get_sequence_number_for_group=lambda: 7)
    monkeypatch.setattr(states, "world", group)
    monkeypatch.setattr(states, "replicas", {})
    found = Model(module=nn.Linear(4, 4), process_group=group, require_backward_grad_sync=True)
    averaging.built(found)
    return found


def train(ddp: Any) -> None:
    ddp.module(torch.ones(2, 4)).sum().backward()
    averaging._writer.end_step()
    averaging.look()


def test_module_when_its_caller_is_looked_for_then_it_can_be_saved(stray: Any) -> None:
    train(stray)
    torch.save(stray.module, io.BytesIO())
    train(stray)
    assert not torch.nn.modules.module._global_forward_pre_hooks


def test_module_when_its_caller_never_comes_then_the_search_ends(
    stray: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(averaging, "_MAX_CALLS", 3)
    train(stray)
    other = nn.Linear(4, 4)
    for _ in range(3):
        other(torch.ones(2, 4))
    assert not torch.nn.modules.module._global_forward_pre_hooks


def test_averaging_when_nothing_is_to_be_said_then_parameters_are_seldom_walked_through(
    stray: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    walks = []
    monkeypatch.setattr(stray.module, "named_parameters", lambda: walks.append(1) or iter(()))
    for _ in range(1000):
        averaging._writer.end_step()
        averaging.look()
    assert 3 <= len(walks) < 40
