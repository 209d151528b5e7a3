"""Does a process note a gather, an average or a window of micro-steps that goes wrong, and nothing of one that is right?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from allranks.record import gathered, notes, windows
from allranks.record import layout as at
from allranks.record.writer import Writer

Noted = list[dict[str, Any]]


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Noted]:
    """What rank 1 of 2 notes."""
    found: Noted = []
    monkeypatch.setattr(notes, "_write", lambda path, kind, values: found.append({"kind": kind, **values}))
    writer = Writer()
    writer.words[at.W_WORLD_SIZE], writer.words[at.W_RANK] = 2, 1
    for module in (gathered, windows):
        monkeypatch.setattr(module, "_writer", writer)
        module._after_fork()
    yield found
    for module in (gathered, windows):
        module._after_fork()


# --- gathers ---


def test_gather_into_one_tensor_then_it_is_noted_once(noted: Noted) -> None:
    for _ in range(2):
        gathered.gathered(([torch.zeros(3)] * 2, torch.ones(3)), {}, 0)
    assert [(n["kind"], n["count"], n["shape"]) for n in noted] == [("aliased", 2, [3])]


@pytest.mark.parametrize(
    "into",
    [
        [torch.zeros(3), torch.zeros(3)],
        list(torch.zeros(2, 3).unbind()),
        [torch.zeros(0)] * 2,
        [torch.zeros(3)],
        5,
        [],
    ],
)
def test_gather_into_what_is_apart_or_empty_then_nothing_is_noted(noted: Noted, into: Any) -> None:
    gathered.gathered((into, torch.ones(3)), {}, 0)
    assert noted == []


def one_loss(features: torch.Tensor, *entries: torch.Tensor, join: Any = torch.cat) -> torch.Tensor:
    """A loss over gathered features, after the gather was seen."""
    gathered.gathered(([torch.zeros(2, 3), torch.zeros(2, 3)], features), {}, 0)
    everything = join(entries)
    return (everything @ everything.transpose(-1, -2)).logsumexp(-1).mean()


@pytest.mark.parametrize("join", [torch.cat, torch.stack])
def test_loss_with_a_gradient_through_the_own_entry_alone_then_it_is_noted(noted: Noted, join: Any) -> None:
    features = nn.Linear(3, 3)(torch.ones(2, 3))
    gathered.look_at_loss(one_loss(features, torch.ones(2, 3), features, join=join))
    assert [(n["kind"], n["ranks"]) for n in noted] == [("own_entry", 2)]
    assert not gathered.gathers


def test_loss_with_all_entries_or_the_other_ones_then_nothing_is_noted(noted: Noted) -> None:
    features = nn.Linear(3, 3)(torch.ones(2, 3))
    gathered.look_at_loss(one_loss(features, features * 2, features))  # as a gather with a gradient gives
    gathered.look_at_loss(
        one_loss(features, features, torch.ones(2, 3))
    )  # queue beside the own features, at another place
    gathered.look_at_loss(
        one_loss(features, torch.ones(2, 3), torch.ones(2, 3))
    )  # of metrics: no gradient at all
    assert noted == []


def test_losses_after_the_first_few_then_no_graph_is_walked(noted: Noted) -> None:
    features = nn.Linear(3, 3)(torch.ones(2, 3))
    for _ in range(gathered.MAX_LOSSES):
        gathered.look_at_loss(one_loss(features, features, features))
    one_loss(features, torch.ones(2, 3), features)
    assert not gathered.gathers


# --- sums ---


def test_integer_sum_divided_in_place_then_what_was_lost_is_noted(noted: Noted) -> None:
    tensor = torch.tensor([21, 8])
    gathered.summed((tensor,), {}, 0)
    tensor.copy_(tensor / 2)
    gathered.look_at_sums()
    assert [(n["kind"], n["sums"], n["used"], n["dtype"]) for n in noted] == [
        ("floored", [21, 8], [10, 4], "int64")
    ]


@pytest.mark.parametrize(
    "start, then",
    [
        (torch.tensor([20]), lambda t: t.floor_divide_(2)),
        (torch.tensor([21]), lambda t: t),
        (torch.tensor([21]), lambda t: t.zero_()),
        (torch.tensor([21.0]), lambda t: t.div_(2)),
        (torch.tensor([True]), lambda t: t),
    ],
)
def test_sum_that_divides_or_is_kept_then_nothing_is_noted(
    noted: Noted, start: torch.Tensor, then: Callable[[torch.Tensor], Any]
) -> None:
    gathered.summed((start,), {}, 0)
    then(start)
    gathered.look_at_sums()
    assert noted == []


def test_maximum_of_integers_then_it_is_no_sum(noted: Noted) -> None:
    tensor = torch.tensor([21])
    gathered.summed((tensor,), {"op": torch.distributed.ReduceOp.MAX}, 0)
    gathered.summed((tensor, torch.distributed.ReduceOp.MIN), {}, 0)
    assert gathered._sums == []


def test_sums_in_floating_point_when_there_were_many_then_no_sum_is_looked_at_any_more(
    noted: Noted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(gathered._left, "float", 3)
    for _ in range(3):
        gathered.summed((torch.ones(4),), {}, 0)
    gathered.summed((torch.tensor([21]),), {}, 0)
    assert gathered._sums == []


# --- windows ---


class Loop:
    """A script's loop over batches, as the marks see it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.model = nn.Linear(2, 1)
        self.optimizer = SGD(self.model.parameters(), lr=0.1)
        monkeypatch.setattr(SGD, "zero_grad", windows._marked(SGD.zero_grad))
        monkeypatch.setattr(windows._writer, "owner", windows.get_ident())

    def run(self, batches: int, every: int, *, is_rest_stepped: bool = False, at_begin: bool = True) -> None:
        """One pass."""
        words = windows._writer.words
        if at_begin:
            self.optimizer.zero_grad()
        words[at.LOADER + at.L_NUMBER] += 1
        windows._writer.light.drawn = words[at.LOADER + at.L_ENDED_NS] = 0
        for i in range(batches):
            windows._writer.light.drawn += 1
            windows._writer.light.micro_steps += 1
            self.model(torch.ones(2)).backward()
            if (i + 1) % every == 0 or (is_rest_stepped and i + 1 == batches):
                windows._writer.end_step()
                self.optimizer.zero_grad()
        words[at.LOADER + at.L_ENDED_NS] = 1


def test_rest_of_a_pass_thrown_away_then_it_is_noted_once(
    noted: Noted, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = Loop(monkeypatch)
    for _ in range(3):
        loop.run(10, 4)
    assert [(n["kind"], n["micro_steps"], n["window"], n["drawn"]) for n in noted] == [
        ("left_over", 2, 4, 10)
    ]


@pytest.mark.parametrize(
    "batches, every, more",
    [
        (12, 4, {}),
        (10, 4, {"is_rest_stepped": True}),
        (10, 1, {}),
        (10, 4, {"at_begin": False}),  # what is left joins the first window of the next pass
    ],
)
def test_windows_that_are_whole_or_stepped_then_nothing_is_noted(
    noted: Noted, monkeypatch: pytest.MonkeyPatch, batches: int, every: int, more: dict[str, Any]
) -> None:
    loop = Loop(monkeypatch)
    loop.run(batches, every, **more)
    loop.run(batches, every, **more)
    assert noted == []


def test_script_that_does_not_accumulate_then_it_is_looked_at_no_longer(
    noted: Noted, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = Loop(monkeypatch)
    loop.run(windows.NO_WINDOWS - 1, 1)
    assert not windows._is_off
    loop.run(windows.NO_WINDOWS + 1, 1)
    assert windows._is_off and noted == []


def test_two_optimizers_then_whose_gradients_are_left_is_not_known(
    noted: Noted, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = Loop(monkeypatch)
    SGD(nn.Linear(1, 1).parameters(), lr=0.1).zero_grad()
    for _ in range(3):
        loop.run(10, 4)
    assert noted == []
