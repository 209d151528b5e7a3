"""Are gradients that go around DDP's reducer the same to the bit, whatever the loop does, and does DDP take part wherever it must?"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import allranks
from allranks.core.errors import CommError
from allranks.wrap import straight
from allranks.wrap.options import LOOK_AT
from support.ranks import run_outcomes, run_ranks

pytestmark = pytest.mark.ranks

_SOONEST = LOOK_AT + 3  # updates until both halves of the memory have seen DDP's buckets


class Heads(nn.Module):
    """Of odd sizes; the second head is used where it is asked for."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body, self.a, self.b = nn.Linear(7, width), nn.Linear(width, 3), nn.Linear(width, 3)

    def forward(self, x: torch.Tensor, use_b: bool = True) -> torch.Tensor:
        hidden = self.body(x).relu()
        return self.a(hidden) + (self.b(hidden) if use_b else 0)


def data(num: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(
        torch.randn(num, 7, generator=generator), torch.randint(0, 3, (num,), generator=generator)
    )


class Counted:
    """How many backwards of this process went straight while this is open, and which may not."""

    def __init__(self, patch: pytest.MonkeyPatch, may: Callable[[int], bool]) -> None:
        self.taken, self.asked = 0, 0
        average = straight.Straight.average

        def counted(way: straight.Straight) -> Any:
            self.taken += 1
            return average(way)

        class Light:
            @property
            def is_on(light) -> bool:
                self.asked += 1
                return may(self.asked)

        patch.setattr(straight.Straight, "average", counted)
        patch.setattr(straight, "_light", Light())
        patch.setattr(straight, "_is_marked", lambda: True)


def train(case: str, may: Callable[[int], bool]) -> tuple[int, list[torch.Tensor], list[torch.Tensor]]:
    """How many backwards went straight, the weights, and the optimizer's state."""
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        counted = Counted(patch, may)
        sizes: dict[str, Any] = {"accumulation_steps": 2} if case == "accumulation" else {}
        with allranks.start(seed=1, global_batch_size=10, **sizes) as run:
            cap: dict[str, Any] = {"bucket_cap_mb": 0.0005} if case == "buckets" else {}
            model = run.model(Heads(400 if case == "large" else 33), name="model", **cap)
            how: dict[str, Any] = {
                "nesterov": {"nesterov": True},
                "decay": {"weight_decay": 0.01},
                "dampening": {"dampening": 0.3},
                "no momentum": {"momentum": 0.0},
            }.get(case, {})
            settings: dict[str, Any] = {"lr": 0.05, "momentum": 0.9, **how}
            optimizer = torch.optim.SGD(model.parameters(), **settings)
            run.optimizer(optimizer, clip_norm=0.5 if case == "clip" else None, warmup_steps=20)
            loader = run.loader(data(75), shuffle=True)
            for _ in run.epochs(5):
                for x, y in loader:
                    _do(case, run, model, optimizer, x, y)
        state = [s["momentum_buffer"] for s in optimizer.state.values() if "momentum_buffer" in s]
        return counted.taken, [p.detach().clone() for p in model.parameters()], [b.clone() for b in state]


def _do(case: str, run: Any, model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    rank, updates = run.rank, run.updates
    use_b = case not in ("unused", "unused later") or (
        (rank + updates) % 2 == 0 if case == "unused" else updates < 20 or rank == 0
    )
    loss = F.cross_entropy(model(x, use_b), y)
    if case == "own" and updates % 7 == 3:
        run.backward(loss)  # its gradients are read before the update
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        run.update()
    elif case == "by hand" and updates % 7 == 3:
        torch.autograd.backward([loss])  # by the script itself: DDP averages
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        run.step(F.cross_entropy(model(x), y))
    elif case == "penalty":
        again = model(x.requires_grad_(True))
        (slope,) = torch.autograd.grad(again.square().sum(), x, create_graph=True)
        run.step(loss + slope.square().mean())
    elif case == "none" and updates % 5 == 4:
        run.step(loss if rank == 0 else None)
    elif case == "reload" and updates == 25:
        optimizer.load_state_dict(optimizer.state_dict())
        run.step(loss)
    elif case == "freeze":
        run.step(loss)
        if run.updates in (20, 24):
            model(x)  # somebody only looks at the outputs
            model.a.requires_grad_(run.updates == 24)
    elif case == "weights":
        run.step(loss * len(y), weight=len(y))
    else:
        run.step(loss)


CASES = ["plain", "accumulation", "large", "buckets", "nesterov", "decay", "dampening", "no momentum", "clip"]
CASES += ["unused", "unused later", "own", "by hand", "penalty", "none", "reload", "freeze", "weights"]


def compare(cases: list[str]) -> list[tuple[str, int]]:
    """By case, how many backwards went straight."""
    used = []
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for case in cases:
        none, right, momentum = train(case, lambda _: False)
        most, weights, buffers = train(case, lambda _: True)
        # Ranks need not agree on the way.
        some, mixed, _ = train(case, lambda number: (number + rank) % 3 > 0)
        assert none == 0
        assert 0 < some < most or case in ("unused", "none"), (case, some, most)
        for one in (weights, mixed):
            assert all(map(torch.equal, one, right)), case
        assert len(buffers) == len(momentum), case
        assert all(map(torch.equal, buffers, momentum)), case
        used.append((case, most))
    dist.destroy_process_group()
    return used


@pytest.mark.parametrize("cases", [CASES[::2], CASES[1::2]], ids=["some", "others"])
def test_step_when_gradients_go_straight_then_bits_of_ddp(cases: list[str]) -> None:
    for used in run_ranks(2, compare, cases, init=False, timeout_s=120):
        for case, number in used:
            assert number > 10, (case, number)


def test_step_when_three_ranks_add_up_in_parts_then_bits_of_ddp() -> None:
    for used in run_ranks(3, compare, ["large", "plain"], init=False, timeout_s=120):
        assert all(number > 10 for _, number in used)


def leave() -> tuple[str, int]:
    """Rank 1 goes without a word while rank 0 steps."""
    with pytest.MonkeyPatch.context() as patch:
        counted = Counted(patch, lambda _: True)
        try:
            with allranks.start(global_batch_size=10) as run:
                model = run.model(Heads(8))
                run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
                for x, y in run.loader(data(400), shuffle=True):
                    loss = F.cross_entropy(model(x), y)
                    if run.rank == 1 and run.updates == _SOONEST + 9:
                        os._exit(3)
                    run.step(loss)
        except CommError as error:
            return error.code, counted.taken
    return "", counted.taken


def test_step_when_a_rank_is_gone_then_the_straight_way_says_so_at_once() -> None:
    outcomes = run_outcomes(2, leave, init=False)
    assert outcomes[0].is_good, outcomes[0].story()
    code, taken = outcomes[0].result
    assert code == "AR050"
    assert taken > 5
