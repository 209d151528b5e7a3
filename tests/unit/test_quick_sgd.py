"""Does the quick step of SGD leave the same bits as torch's, also in the optimizer's state, and stand aside where something is unusual?"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.optimizer import register_optimizer_step_pre_hook

from allranks.train import kernels
from allranks.train.quick_sgd import QuickSgd
from allranks.train.slots import OptimizerSlot
from allranks.wrap.straight import Bucket

_SHAPES = ((7,), (64, 33), (1001,), (10,))


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in _SHAPES]


def give_gradients(ps: list[nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in ps:
        p.grad = torch.randn(p.shape, generator=generator)


class Pair:
    """The same training twice: with torch's foreach form, and through a slot, which steps quickly where it can."""

    def __init__(self, make: Callable[[list[nn.Parameter]], SGD]) -> None:
        self.plain, self.quick = parameters(), parameters()
        self.theirs, ours = make(self.plain), make(self.quick)
        assert kernels.choose(self.theirs)
        self.slot = OptimizerSlot("optimizer", ours)
        self.taken: list[bool] = []

    def step(self, seed: int, change: Callable[[SGD, list[nn.Parameter]], Any] = lambda *_: None) -> None:
        """One step of both; with `change` done before."""
        ours: Any = self.slot.optimizer
        for optimizer, ps in ((self.theirs, self.plain), (ours, self.quick)):
            give_gradients(ps, seed)
            change(optimizer, ps)
        self.theirs.step()
        if self.slot.quick is not None:
            step, took = self.slot.quick.step, self.taken
            self.slot.quick.step = lambda: took.append(step()) or took[-1]  # type: ignore[method-assign]
        self.slot.take_step(None)
        if self.slot.quick is not None:
            self.slot.quick.__dict__.pop("step", None)

    def assert_same(self) -> None:
        """Parameters, gradients and state."""
        for p, q in zip(self.plain, self.quick, strict=True):
            assert torch.equal(p, q)
            assert (p.grad is None) == (q.grad is None)
            assert p.grad is None or q.grad is None or torch.equal(p.grad, q.grad)
        mine, theirs = self.slot.optimizer.state_dict()["state"], self.theirs.state_dict()["state"]
        assert mine.keys() == theirs.keys()
        for key in mine:
            assert mine[key].keys() == theirs[key].keys()
            assert all(torch.equal(mine[key][name], theirs[key][name]) for name in mine[key])


SETTINGS: list[dict[str, Any]] = [
    {"lr": 0.1},
    {"lr": 0.1, "weight_decay": 0.01},
    {"lr": 0.01, "momentum": 0.9},
    {"lr": 0.013, "momentum": 0.9, "weight_decay": 1e-4, "nesterov": True},
    {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1},
    {"lr": 0.1, "momentum": 0.9, "nesterov": True},
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_step_when_nothing_is_unusual_then_quick_and_same_bits(settings: dict[str, Any]) -> None:
    pair = Pair(lambda ps: SGD(ps, **settings))
    for seed in range(6):
        pair.step(seed)
        pair.assert_same()
    # Before the first step there is no momentum yet.
    assert pair.taken == [True] * 5


def test_step_when_groups_differ_then_quick_and_same_bits() -> None:
    pair = Pair(
        lambda ps: SGD(
            [{"params": ps[:1], "momentum": 0.0}, {"params": ps[1:], "lr": 0.02, "weight_decay": 0.1}],
            lr=0.1,
            momentum=0.9,
        )
    )
    for seed in range(4):
        pair.step(seed)
        pair.assert_same()
    assert pair.taken == [True] * 3


def test_step_when_a_scheduler_counts_steps_then_quick_and_it_still_counts() -> None:
    pair = Pair(lambda ps: SGD(ps, lr=0.1, momentum=0.9))
    schedules = [
        torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) for optimizer in (pair.theirs, pair.slot.optimizer)
    ]
    for seed in range(4):
        pair.step(seed)
        for schedule in schedules:
            schedule.step()  # warns, which is an error here, if no step came before
    pair.assert_same()
    assert pair.taken == [True] * 3


def no_gradient(_: SGD, ps: list[nn.Parameter]) -> None:
    ps[1].grad = None


def forget_one(optimizer: SGD, ps: list[nn.Parameter]) -> None:
    optimizer.state[ps[2]] = {}


def forget_all(optimizer: SGD, _: list[nn.Parameter]) -> None:
    optimizer.state.clear()


def another_order(optimizer: SGD, ps: list[nn.Parameter]) -> None:
    optimizer.state[ps[0]] = optimizer.state.pop(ps[0])


def rate_in_a_tensor(optimizer: SGD, _: list[nn.Parameter]) -> None:
    optimizer.param_groups[0]["lr"] = torch.tensor(0.05)


def other_way_round(optimizer: SGD, _: list[nn.Parameter]) -> None:
    optimizer.param_groups[0]["maximize"] = True


def own_step(optimizer: Any, _: list[nn.Parameter]) -> None:
    step = type(optimizer).step
    optimizer.step = lambda: [step(optimizer), step(optimizer)]


@pytest.mark.parametrize(
    "change",
    [no_gradient, forget_one, forget_all, another_order, rate_in_a_tensor, other_way_round, own_step],
)
def test_step_when_something_is_unusual_then_torchs_own(change: Any) -> None:
    pair = Pair(lambda ps: SGD(ps, lr=0.1, momentum=0.9))
    for seed in range(3):
        pair.step(seed)
    pair.step(3, change)
    assert pair.taken == [True, True, False]
    pair.assert_same()
    pair.step(4)
    pair.assert_same()


def test_step_when_state_is_loaded_or_a_buffer_replaced_then_those_are_used() -> None:
    pair = Pair(lambda ps: SGD(ps, lr=0.1, momentum=0.9))
    for seed in range(3):
        pair.step(seed)
    saved = copy.deepcopy(pair.theirs.state_dict())
    pair.step(3)
    pair.theirs.load_state_dict(copy.deepcopy(saved))
    pair.slot.optimizer.load_state_dict(kernels.with_present_form(pair.slot.optimizer, copy.deepcopy(saved)))
    pair.step(4)

    def replace(optimizer: SGD, ps: list[nn.Parameter]) -> None:
        optimizer.state[ps[1]]["momentum_buffer"] = torch.ones_like(ps[1])

    pair.step(5, replace)
    pair.assert_same()
    assert pair.taken == [True] * 5


def test_step_when_somebody_else_listens_then_torchs_own_and_he_hears_it() -> None:
    pair, heard = Pair(lambda ps: SGD(ps, lr=0.1)), []
    pair.step(0)
    pair.step(1)
    own = pair.slot.optimizer.register_step_post_hook(lambda *_: heard.append("own"))
    pair.step(2)
    own.remove()
    everyones = register_optimizer_step_pre_hook(lambda *_: heard.append("global"))
    try:
        pair.step(3)
    finally:
        everyones.remove()
    with torch.profiler.profile() as profile:
        pair.step(4)
    pair.step(5)
    assert pair.taken == [True, False, False, False, True]
    assert heard == ["own", "global", "global"]  # of both optimizers
    assert any("Optimizer.step#SGD" in event.name for event in profile.events() or [])
    pair.assert_same()


class OwnSgd(SGD):
    """A class of the user's."""


def test_quick_when_class_is_another_then_none() -> None:
    assert QuickSgd.of(OwnSgd(parameters(), lr=0.1)) is None
    assert QuickSgd.of(torch.optim.Adam(parameters())) is None
    before = SGD.step
    SGD.step = lambda self, closure=None: None  # type: ignore[method-assign]
    try:
        assert QuickSgd.of(SGD(parameters(), lr=0.1)) is None
    finally:
        SGD.step = before  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "settings",
    [{"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}, {"momentum": 0.7, "dampening": 0.3}, {}],
    ids=["momentum", "nesterov", "dampening", "plain"],
)
def test_step_when_gradients_lie_in_one_piece_then_the_bits_of_one_by_one(settings: dict[str, Any]) -> None:
    pair = Pair(lambda ps: SGD(ps, lr=0.0173, **settings))
    order = pair.quick[::-1]
    flat = torch.empty(sum(p.numel() for p in order))
    views = [v.view_as(p) for v, p in zip(flat.split([p.numel() for p in order]), order, strict=True)]
    whole = Bucket(flat, order, views)
    taken = []
    for seed in range(6):
        give_gradients(pair.plain, seed)
        give_gradients(pair.quick, seed)
        flat.copy_(torch.cat([p.grad.reshape(-1) for p in order if p.grad is not None]))
        pair.theirs.step()
        if seed == 4:
            pair.slot.optimizer.load_state_dict(copy.deepcopy(pair.slot.optimizer.state_dict()))
        before = [p.grad for p in pair.quick]
        pair.slot.take_step(None, whole)
        taken.append(all(p.grad is g for p, g in zip(pair.quick, before, strict=True)))
        for p, q in zip(pair.plain, pair.quick, strict=True):
            assert torch.equal(p, q)
        states = pair.theirs.state_dict()["state"], pair.slot.optimizer.state_dict()["state"]
        assert states[0].keys() == states[1].keys()
        for place, state in states[0].items():
            if settings:
                assert torch.equal(state["momentum_buffer"], states[1][place]["momentum_buffer"])
    # Where it was not taken, gradients were placed: in the first step (no momentum yet), and after a state was loaded.
    assert taken == ([False, True, True, True, False, True] if settings else [True] * 6)


def momentum_of(value: float) -> Callable[[SGD], None]:
    def change(optimizer: SGD) -> None:
        optimizer.param_groups[0]["momentum"] = value

    return change


def halve_in_place(optimizer: SGD) -> None:
    for state in optimizer.state.values():
        state["momentum_buffer"].data = state["momentum_buffer"].data * 0.5


@pytest.mark.parametrize(
    ("first", "changes"),
    [
        (0.0, {3: momentum_of(0.9)}),
        (0.9, {3: momentum_of(0.0), 6: momentum_of(0.9)}),
        (0.9, {3: halve_in_place}),
    ],
    ids=["begins", "pauses", "data"],
)
def test_step_in_one_piece_when_momentum_changes_in_between_then_the_bits_of_one_by_one(
    first: float, changes: dict[int, Callable[[SGD], None]]
) -> None:
    pair = Pair(lambda ps: SGD(ps, lr=0.0173, momentum=first))
    flat = torch.empty(sum(p.numel() for p in pair.quick))
    pieces = flat.split([p.numel() for p in pair.quick])
    whole = Bucket(flat, pair.quick, [v.view_as(p) for v, p in zip(pieces, pair.quick, strict=True)])
    for seed in range(9):
        give_gradients(pair.plain, seed)
        give_gradients(pair.quick, seed)
        flat.copy_(torch.cat([p.grad.reshape(-1) for p in pair.quick if p.grad is not None]))
        for optimizer in (pair.theirs, pair.slot.optimizer):
            if seed in changes:
                changes[seed](optimizer)  # type: ignore[arg-type]
        pair.theirs.step()
        pair.slot.take_step(None, whole)
        assert all(map(torch.equal, pair.plain, pair.quick)), seed
