"""Does a step on many ranks make the update that one device makes?"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import allranks
from allranks.core.errors import UsageError
from ranks.reference import assert_close, net, order_of, points, train_on_one
from support.ranks import run_ranks

pytestmark = pytest.mark.ranks


def parameters_of(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def train(folder: str, num: int, batch: int, epochs: int, **settings: Any) -> list[torch.Tensor]:
    with allranks.start(folder, global_batch_size=batch, **settings) as run:
        model = run.model(net())
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        loader = run.loader(points(num), shuffle=True)
        for _ in run.epochs(epochs):
            for x, y in loader:
                run.step(F.mse_loss(model(x), y))
        return parameters_of(model)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "settings",
    [{}, {"accumulation_steps": 3}, {"micro_batch_size": 2}],
    ids=["plain", "window-of-3", "micro-batches-of-2"],
)
def test_step_when_last_batch_is_uneven_then_as_one_device(
    tmp_path: Any, world_size: int, settings: dict[str, int]
) -> None:
    # 45 samples in batches of 10: the last has 5, so that 2 and 4 ranks have uneven shares and windows are partial.
    right = train_on_one(points(45), batch=10, epochs=2)
    for mine in run_ranks(world_size, train_with, str(tmp_path), settings, init=False):
        assert_close(mine, right)


def train_with(folder: str, settings: dict[str, int]) -> list[torch.Tensor]:
    return train(folder, 45, 10, 2, **settings)


def test_step_when_a_rank_has_no_sample_then_as_one_device(tmp_path: Any) -> None:
    # 21 samples in batches of 10: the last has one, for rank 0 alone; ranks 1 and 2 take part with nothing.
    right = train_on_one(points(21), batch=10, epochs=2)
    for mine in run_ranks(3, train, str(tmp_path), 21, 10, 2, init=False):
        assert_close(mine, right)


def test_step_when_one_rank_then_bits_of_one_device(tmp_path: Any) -> None:
    right = train_on_one(points(40), batch=10, epochs=2)
    (mine,) = run_ranks(1, train, str(tmp_path), 40, 10, 2, init=False)
    assert all(torch.equal(a, b) for a, b in zip(mine, right, strict=True))


# -- weights ---------------------------------------------------------------------------------------------------------------


def masked(num: int = 45) -> TensorDataset:
    x, y = points(num).tensors
    counts = (torch.arange(num) * 7) % 5 > 1  # valid targets
    return TensorDataset(x, y, counts)


def train_weighted(folder: str, settings: dict[str, int]) -> list[torch.Tensor]:
    with allranks.start(folder, global_batch_size=10, **settings) as run:
        model = run.model(net())
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        loader = run.loader(masked(), shuffle=True)
        for _ in run.epochs(2):
            for x, y, valid in loader:
                own = valid if loader.current.num_samples else valid & False
                loss_sum = ((model(x) - y).square().sum(1) * own).sum()
                run.step(loss_sum, weight=int(own.sum()))
        return parameters_of(model)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("settings", [{}, {"accumulation_steps": 2}], ids=["plain", "window-of-2"])
def test_step_when_weights_are_given_then_sum_over_sum(
    tmp_path: Any, world_size: int, settings: dict[str, int]
) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = masked()
    for epoch in range(2):
        order = order_of(45, 0, epoch)
        for first in range(0, 45, 10):
            x, y, valid = data[order[first : first + 10]]
            optimizer.zero_grad()
            (((model(x) - y).square().sum(1) * valid).sum() / valid.sum()).backward()
            optimizer.step()
    for mine in run_ranks(world_size, train_weighted, str(tmp_path), settings, init=False):
        assert_close(mine, parameters_of(model))


def step_without_any_weight(folder: str) -> tuple[bool, bool]:
    with allranks.start(folder, global_batch_size=10) as run:
        model = run.model(net())
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        before = parameters_of(model)
        x, y = points(10).tensors
        with pytest.warns(allranks.AllranksWarning, match="AR111"):
            update = run.step((model(x) - y).square().sum() * 0, weight=0)
        return update.skipped, all(
            torch.equal(a, b) for a, b in zip(before, parameters_of(model), strict=True)
        )


def test_step_when_all_weights_are_zero_then_update_is_skipped_and_said(tmp_path: Any) -> None:
    assert run_ranks(2, step_without_any_weight, str(tmp_path), init=False) == [(True, True)] * 2


# -- losses that are not there ----------------------------------------------------------------------------------------------


def train_with_missing_losses(folder: str, calls_model: bool, accumulation_steps: int) -> list[torch.Tensor]:
    with allranks.start(folder, global_batch_size=8, accumulation_steps=accumulation_steps) as run:
        model = run.model(net())
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        loader = run.loader(points(40), shuffle=True)
        for _ in run.epochs(2):
            for x, y in loader:
                skips = run.rank == run.world_size - 1 and loader.current.batch % 2 == 0
                if skips and not calls_model:
                    run.step(None)
                    continue
                loss = F.mse_loss(model(x), y)
                run.step(None if skips else loss)
        return parameters_of(model)


@pytest.mark.parametrize("calls_model", [True, False])
@pytest.mark.parametrize("accumulation_steps", [1, 2])
def test_step_when_loss_is_none_on_one_rank_then_it_counts_zero(
    tmp_path: Any, calls_model: bool, accumulation_steps: int
) -> None:
    # One rank in two leaves out its half of every second batch: there the gradient is half of the other half's.
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(2):
        order = order_of(40, 0, epoch)
        for batch in range(5):
            x, y = points(40)[order[batch * 8 : batch * 8 + 8]]
            optimizer.zero_grad()
            out = model(x)
            loss = F.mse_loss(out[:4], y[:4]) / 2 if batch % 2 == 0 else F.mse_loss(out, y)
            loss.backward()
            optimizer.step()
    results = run_ranks(
        2, train_with_missing_losses, str(tmp_path), calls_model, accumulation_steps, init=False
    )
    for mine in results:
        assert_close(mine, parameters_of(model))


# -- parameters without gradient ---------------------------------------------------------------------------------------------


class Heads(nn.Module):
    """A trunk with two heads, of which a forward may leave one out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.a, self.b = (
            nn.Linear(6, 4).double(),
            nn.Linear(4, 2).double(),
            nn.Linear(4, 2).double(),
        )

    def forward(self, x: torch.Tensor, uses_b: bool) -> torch.Tensor:
        h = torch.tanh(self.trunk(x))
        return self.a(h) + self.b(h) if uses_b else self.a(h)


def uses_b(case: str, rank: int, step: int) -> bool:
    return {
        "nowhere": False,
        "first-step-on-one-rank": not (rank == 1 and step == 0),
        "later-on-one-rank": not (rank == 1 and step == 2),
        "first-micro-batch-only": step % 2 == 0,
    }[case]


def train_heads(folder: str, case: str) -> list[torch.Tensor]:
    accumulation_steps = 2 if case == "first-micro-batch-only" else 1
    with allranks.start(folder, global_batch_size=8, accumulation_steps=accumulation_steps) as run:
        model = run.model(Heads())
        # weight decay moves a parameter whose gradient is zero, but not one whose gradient is None
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1))
        loader = run.loader(points(32), train=True)
        for step, (x, y) in enumerate(loader):
            run.step(F.mse_loss(model(x, uses_b(case, run.rank, step)), y))
        return parameters_of(model)


def one_device_heads(case: str) -> list[torch.Tensor]:
    model = Heads()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    for g in range(4):
        x, y = points(32)[list(range(g * 8, g * 8 + 8))]
        optimizer.zero_grad()
        loss = torch.zeros((), dtype=torch.float64)
        for rank in range(2):
            for micro in range(2 if case == "first-micro-batch-only" else 1):
                step = 2 * g + micro if case == "first-micro-batch-only" else g
                size = 4 if case != "first-micro-batch-only" else 2
                at = rank * 4 + micro * size
                mine = slice(at, at + size)
                loss = loss + F.mse_loss(model(x[mine], uses_b(case, rank, step)), y[mine]) * size / 8
        loss.backward()
        optimizer.step()
    return parameters_of(model)


@pytest.mark.parametrize(
    "case", ["nowhere", "first-step-on-one-rank", "later-on-one-rank", "first-micro-batch-only"]
)
@pytest.mark.filterwarnings("ignore:AR285")
def test_step_when_parameters_get_no_gradient_then_as_one_device(tmp_path: Any, case: str) -> None:
    for mine in run_ranks(2, train_heads_quietly, str(tmp_path), case, init=False):
        assert_close(mine, one_device_heads(case))


def train_heads_quietly(folder: str, case: str) -> list[torch.Tensor]:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", allranks.AllranksWarning)
        return train_heads(folder, case)


def freeze_and_unfreeze(folder: str) -> list[torch.Tensor]:
    with allranks.start(folder, global_batch_size=8) as run:
        plain = net()
        plain[0].requires_grad_(False)
        model = run.model(plain)
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        loader = run.loader(points(48), train=True)
        for x, y in loader:
            plain[0].requires_grad_(2 <= loader.current.batch < 4)
            plain[2].requires_grad_(loader.current.batch != 4)
            if loader.current.batch == 4:
                plain[0].bias.requires_grad_(True)
            run.step(F.mse_loss(model(x), y))
        return parameters_of(model)


def test_step_when_layers_are_frozen_and_unfrozen_after_wrapping_then_as_one_device(tmp_path: Any) -> None:
    (right,) = run_ranks(1, freeze_and_unfreeze, str(tmp_path), init=False)
    for mine in run_ranks(3, freeze_and_unfreeze, str(tmp_path), init=False):
        assert_close(mine, right)


# -- loops that step does not fit --------------------------------------------------------------------------------------------


def several_losses(folder: str) -> list[torch.Tensor]:
    with allranks.start(folder, global_batch_size=8) as run:
        model = run.model(net())
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for x, y in run.loader(points(40), train=True):
            with run.accumulate():
                run.backward(F.mse_loss(model(x), y))
                run.backward(0.1 * model(x).square().mean())
            run.update(clip_norm=1.0)
        return parameters_of(model)


def test_update_when_several_backwards_are_accumulated_then_as_one_device(tmp_path: Any) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for g in range(5):
        x, y = points(40)[list(range(g * 8, g * 8 + 8))]
        optimizer.zero_grad()
        (F.mse_loss(model(x), y) + 0.1 * model(x).square().mean()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    for mine in run_ranks(3, several_losses, str(tmp_path), init=False):
        assert_close(mine, parameters_of(model))


def two_reduced_backwards(folder: str) -> str:
    with allranks.start(folder, global_batch_size=8) as run:
        model = run.model(net())
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        x, y = points(8).tensors
        run.backward(F.mse_loss(model(x), y))
        with pytest.raises(UsageError) as caught:
            run.backward(model(x).square().mean())
        return caught.value.code


def test_backward_when_gradients_were_averaged_already_then_error(tmp_path: Any) -> None:
    assert run_ranks(2, two_reduced_backwards, str(tmp_path), init=False) == ["AR116"] * 2


def gradient_penalty(folder: str) -> list[torch.Tensor]:
    with allranks.start(folder, global_batch_size=8) as run:
        model = run.model(net())
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for x, y in run.loader(points(40), train=True):
            x.requires_grad_(True)
            out = model(x)
            (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            run.step(F.mse_loss(out, y) + slope.square().sum(1).mean())
        return parameters_of(model)


def test_step_when_loss_has_a_gradient_penalty_then_as_one_device(tmp_path: Any) -> None:
    (right,) = run_ranks(1, gradient_penalty, str(tmp_path), init=False)
    for mine in run_ranks(2, gradient_penalty, str(tmp_path), init=False):
        assert_close(mine, right)


def adversarial(folder: str, accumulation_steps: int) -> list[torch.Tensor]:
    with allranks.start(folder, global_batch_size=8, accumulation_steps=accumulation_steps) as run:
        torch.manual_seed(0)
        maker = run.model(nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 6)).double())
        judge = run.model(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double())
        for_maker = run.optimizer(torch.optim.SGD(maker.parameters(), lr=0.1))
        for_judge = run.optimizer(torch.optim.SGD(judge.parameters(), lr=0.1))
        for x, y in run.loader(points(40), train=True):
            fake = maker(y)
            run.step(
                judge(x).mean() - judge(fake.detach()).mean() + judge(x).square().mean(), optimizer=for_judge
            )
            run.step(judge(fake).mean(), optimizer=for_maker)
        assert run.updates == 5
        return parameters_of(maker) + parameters_of(judge)


@pytest.mark.parametrize("accumulation_steps", [1, 2])
def test_step_when_two_models_play_against_each_other_then_as_one_device(
    tmp_path: Any, accumulation_steps: int
) -> None:
    torch.manual_seed(0)
    maker = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 6)).double()
    judge = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    for g in range(5):
        x, y = points(40)[list(range(g * 8, g * 8 + 8))]
        # Windows: every micro-batch is computed before either model is updated, but a window of one updates the judge first.
        fake = maker(y)
        judge_loss = judge(x).mean() - judge(fake.detach()).mean() + judge(x).square().mean()
        grads = torch.autograd.grad(judge_loss, list(judge.parameters()))
        if accumulation_steps == 1:
            with torch.no_grad():
                for p, d in zip(judge.parameters(), grads, strict=True):
                    p -= 0.1 * d
            maker_grads = torch.autograd.grad(judge(fake).mean(), list(maker.parameters()))
        else:
            maker_grads, grads = adversarial_window(maker, judge, x, y)
            with torch.no_grad():
                for p, d in zip(judge.parameters(), grads, strict=True):
                    p -= 0.1 * d
        with torch.no_grad():
            for p, d in zip(maker.parameters(), maker_grads, strict=True):
                p -= 0.1 * d
    right = parameters_of(maker) + parameters_of(judge)
    for mine in run_ranks(2, adversarial, str(tmp_path), accumulation_steps, init=False):
        assert_close(mine, right)


def adversarial_window(
    maker: nn.Module, judge: nn.Module, x: torch.Tensor, y: torch.Tensor
) -> tuple[Any, Any]:
    """Two ranks, two micro-batches each: the judge is updated by the last, before the maker's loss of the last."""
    import copy

    fake = maker(y)
    judge_loss = judge(x).mean() - judge(fake.detach()).mean() + judge(x).square().mean()
    grads = torch.autograd.grad(judge_loss, list(judge.parameters()))
    updated = copy.deepcopy(judge)
    with torch.no_grad():
        for p, d in zip(updated.parameters(), grads, strict=True):
            p -= 0.1 * d
    first, last = [0, 1, 4, 5], [2, 3, 6, 7]  # rows of the first and the last micro-batches of the two ranks
    loss = judge(fake[first]).sum() / 8 + updated(fake[last]).sum() / 8
    return torch.autograd.grad(loss, list(maker.parameters())), grads
