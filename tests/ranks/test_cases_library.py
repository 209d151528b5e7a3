"""Can the wrong results that people reported with other tools happen here? One test for each case of the collection, by its number.

Each does what the reporter did, through allranks, and asks for the result of one device (or for an error with a name).
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import allranks
from support.ranks import run_ranks

pytestmark = pytest.mark.ranks


def net() -> nn.Sequential:
    """A small float64 network with the same weights everywhere."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def samples(n: int) -> TensorDataset:
    """n samples of three features and a target."""
    g = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(n, 3, generator=g, dtype=torch.float64),
        torch.randn(n, 1, generator=g, dtype=torch.float64),
    )


def weights_of(model: nn.Module) -> torch.Tensor:
    """All parameters in one vector."""
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def on_one_device(data: TensorDataset, batch_size: int, lr: float = 0.1) -> torch.Tensor:
    """The weights after one epoch of plain SGD, without allranks."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for x, y in DataLoader(data, batch_size):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    return weights_of(model)


def assert_as_one_device(ranks: list[torch.Tensor], wanted: torch.Tensor) -> None:
    """Every rank ends with the wanted weights, and all with the same bits."""
    for weights in ranks:
        # float64, a dozen updates of 21 weights: rounding stays far below 1e-12; the cases are wrong by 1e-2 and more.
        torch.testing.assert_close(weights, wanted, rtol=1e-12, atol=1e-12)
        assert torch.equal(weights, ranks[0])


# -- C26: the forward goes to the inner module ---------------------------------------------------------------------------------


def train_on_inner_module() -> torch.Tensor:
    with allranks.start("run", global_batch_size=4) as run:
        model = run.model(net())
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for x, y in run.loader(samples(12), train=True):
            run.step(F.mse_loss(model.module(x), y))
        return weights_of(model)


def test_case_c26_when_the_inner_module_is_called_then_gradients_are_averaged_all_the_same() -> None:
    assert_as_one_device(run_ranks(2, train_on_inner_module), on_one_device(samples(12), 4))


# -- C28: a scheduler is fed with a rank's own loss ----------------------------------------------------------------------------


def schedule_by_loss() -> tuple[str, float]:
    with allranks.start("run") as run:
        model = run.model(net())
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
        code = ""
        try:
            run.scheduler(scheduler)
        except allranks.AllranksError as error:
            code = error.code
        for epoch in range(6):
            loss = 1.0 / (epoch + 1) if run.rank == 0 else 1.0  # falls on rank 0, is flat on rank 1
            scheduler.step(run.mean(loss))
        return code, optimizer.param_groups[0]["lr"]


def test_case_c28_when_a_plateau_scheduler_is_registered_then_refused_and_a_mean_keeps_rates_equal() -> None:
    assert run_ranks(2, schedule_by_loss) == [("AR113", 0.1)] * 2


# -- C29: one rank's NaN, another rank's decision ------------------------------------------------------------------------------


def skip_if_not_finite() -> torch.Tensor:
    with allranks.start("run", global_batch_size=4) as run:
        model = run.model(net())
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for number, (x, y) in enumerate(run.loader(samples(12), train=True)):
            if number == 1 and run.rank == 1:
                x = x * float("nan")
            loss = F.mse_loss(model(x), y)
            run.step(None if run.any(not torch.isfinite(loss)) else loss)
        return weights_of(model)


def test_case_c29_when_one_rank_has_nan_then_all_skip_together() -> None:
    kept = TensorDataset(*(torch.cat([t[:4], t[8:]]) for t in samples(12).tensors))
    assert_as_one_device(run_ranks(2, skip_if_not_finite), on_one_device(kept, 4))


# -- C31: a mean of whole numbers ----------------------------------------------------------------------------------------------


def mean_of_counts() -> tuple[float, float, float]:
    with allranks.start("run") as run:
        count = (11, 11, 10, 10)[run.rank]
        return run.mean(count), run.mean(torch.tensor(count)), float(run.sum(10.5 * 4)) / run.sum(count)


def test_case_c31_when_counts_are_averaged_then_not_rounded_down() -> None:
    assert run_ranks(4, mean_of_counts) == [(10.5, 10.5, 4.0)] * 4


# -- C32: evaluation counts samples twice --------------------------------------------------------------------------------------


def evaluate_ten() -> tuple[list[int], list[int], int]:
    data = TensorDataset(torch.arange(10))
    with allranks.start("run") as run:
        sampler = DistributedSampler(data, num_replicas=run.world_size, rank=run.rank, shuffle=False)
        loader = run.loader(DataLoader(data, batch_size=1, sampler=sampler))
        own = [int(i) for (batch,) in loader for i in batch]
        return own, run.gather(own, loader=loader), run.sum(len(own))


def test_case_c32_when_ten_samples_are_evaluated_on_three_ranks_then_ten_predictions() -> None:
    ranks = run_ranks(3, evaluate_ten)
    assert sorted(i for own, _, _ in ranks for i in own) == list(range(10))
    assert all(gathered == list(range(10)) and count == 10 for _, gathered, count in ranks)


# -- C34: a mean of means of unequal counts ------------------------------------------------------------------------------------

COUNTS = ((2, 30), (5, 11))  # by rank and micro-batch


def gradient_of_uneven_parts() -> torch.Tensor:
    x, y = samples(48).tensors
    parts = iter(zip(x.split([2, 30, 5, 11]), y.split([2, 30, 5, 11]), strict=True))
    by_rank = [[next(parts) for _ in counts] for counts in COUNTS]
    with allranks.start("run") as run:
        model = run.model(net())
        run.optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
        before = weights_of(model)
        with run.accumulate():
            for part_x, part_y in by_rank[run.rank]:
                errors = (model(part_x) - part_y).square()
                run.backward(errors.sum(), weight=len(errors))
        run.update()
        return before - weights_of(model)


def test_case_c34_when_parts_have_unequal_counts_then_the_gradient_is_that_of_the_whole() -> None:
    model = net()
    x, y = samples(48).tensors
    F.mse_loss(model(x), y).backward()
    wanted = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
    for gradient in run_ranks(2, gradient_of_uneven_parts):
        torch.testing.assert_close(gradient, wanted, rtol=1e-12, atol=1e-12)


# -- C35 and C46: gathering ----------------------------------------------------------------------------------------------------


def gather_own_numbers() -> tuple[list[float], list[list[int]]]:
    with allranks.start("run") as run:
        every = run.gather(torch.tensor([float(run.rank)]))
        every[0] += 10  # must not be the same storage as the others' rows
        rows = torch.arange(5 if run.rank == 0 else 3).reshape(-1, 1) + 100 * run.rank
        return every.tolist(), run.gather(rows).tolist()


def test_cases_c35_c46_when_rows_are_gathered_then_each_ranks_own_and_no_rest() -> None:
    uneven = [[0], [1], [2], [3], [4], [100], [101], [102]]
    assert run_ranks(2, gather_own_numbers) == [([10.0, 1.0], uneven)] * 2


# -- C37: the scheduler advances once per rank ---------------------------------------------------------------------------------


def rate_after_five_updates() -> float:
    with allranks.start("run", global_batch_size=2) as run:
        model = run.model(net())
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
        run.scheduler(torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 10))
        for x, y in run.loader(samples(10), train=True):
            run.step(F.mse_loss(model(x), y))
        return optimizer.param_groups[0]["lr"]


def test_case_c37_when_half_of_a_linear_schedule_is_done_then_half_the_rate() -> None:
    assert run_ranks(2, rate_after_five_updates) == [0.5, 0.5]


# -- C38: a buffer is computed from the local batch ----------------------------------------------------------------------------


class Codebook(nn.Module):
    """Moves a buffer towards the mean of what it sees, as vector quantizers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1).double()
        self.register_buffer("centre", torch.zeros(3, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.centre.lerp_(x.detach().mean(0), 0.5)  # type: ignore[operator]
        return self.layer(x - self.centre)


def learn_codebook() -> tuple[torch.Tensor, list[str]]:
    with allranks.start("run", global_batch_size=4) as run, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = run.model(Codebook())
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for x, y in run.loader(samples(12), train=True):
            run.step(F.mse_loss(model(x), y))
        return model.centre.clone(), [str(w.message) for w in caught]


def test_case_c38_when_a_buffer_follows_the_local_batch_then_equal_on_ranks_and_said_by_name() -> None:
    (first, said), (second, _) = run_ranks(2, learn_codebook)
    assert torch.equal(first, second)
    assert any("AR110" in text and "centre" in text for text in said), said


# -- C40: unfrozen after wrapping ----------------------------------------------------------------------------------------------


def unfreeze_later() -> torch.Tensor:
    with allranks.start("run", global_batch_size=4) as run:
        plain = net()
        plain[0].requires_grad_(False)
        model = run.model(plain)
        plain[0].requires_grad_(True)
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for x, y in run.loader(samples(12), train=True):
            run.step(F.mse_loss(model(x), y))
        return weights_of(model)


def test_case_c40_when_a_layer_is_unfrozen_after_wrapping_then_it_trains_alike_on_all_ranks() -> None:
    assert_as_one_device(run_ranks(2, unfreeze_later), on_one_device(samples(12), 4))


# -- C41: the partial window at the end ----------------------------------------------------------------------------------------


def ten_micro_batches() -> tuple[int, torch.Tensor]:
    with allranks.start("run", global_batch_size=8, accumulation_steps=4) as run:
        model = run.model(net())
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        num_micro_batches = 0
        for x, y in run.loader(samples(20), train=True):
            num_micro_batches += 1
            run.step(F.mse_loss(model(x), y))
        assert (num_micro_batches, run.updates) == (10, 3)
        return run.updates, weights_of(model)


def test_case_c41_when_ten_micro_batches_make_windows_of_four_then_three_updates_of_true_size() -> None:
    ranks = run_ranks(2, ten_micro_batches)
    assert [updates for updates, _ in ranks] == [3, 3]
    assert_as_one_device([weights for _, weights in ranks], on_one_device(samples(20), 8))


# -- C43: a loss over gathered outputs -----------------------------------------------------------------------------------------


def contrast(z: torch.Tensor) -> torch.Tensor:
    """A loss in which each sample meets all others."""
    return (z @ z.T).exp().mean()


def contrast_over_ranks(n: int) -> torch.Tensor:
    with allranks.start("run", global_batch_size=n) as run:
        model = run.model(net())
        run.optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
        before = weights_of(model)
        for x, _ in run.loader(samples(n), train=True):
            run.step(contrast(run.gather(model(x))))
        return before - weights_of(model)


# 1 of 2: rank 1 has no sample of its own and stands in with rank 0's, which must not count twice.
@pytest.mark.parametrize(("world_size", "n"), [(2, 8), (3, 7), (2, 1)])
def test_case_c43_when_the_loss_is_over_gathered_outputs_then_the_whole_gradient(
    world_size: int, n: int
) -> None:
    model = net()
    contrast(model(samples(n).tensors[0])).backward()
    wanted = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
    for gradient in run_ranks(world_size, contrast_over_ranks, n):
        torch.testing.assert_close(gradient, wanted, rtol=1e-12, atol=1e-12)


# -- C44: the average that never moves -----------------------------------------------------------------------------------------


def average(is_compiled: bool) -> tuple[list[str], torch.Tensor]:
    with allranks.start("run", global_batch_size=4) as run:
        plain: Any = torch.compile(net(), backend="eager") if is_compiled else net()
        model = run.model(plain)
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        ema = run.ema(model, decay=0.5, warmup=False)
        for x, y in run.loader(samples(12), train=True):
            run.step(F.mse_loss(model(x), y))
        return list(ema.state_dict()["module"]), weights_of(ema.module)


def average_on_one_device() -> torch.Tensor:
    """The average of the weights after each of three updates: the first as it is, then half and half."""
    model, mean = net(), torch.empty(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, (x, y) in enumerate(DataLoader(samples(12), 4)):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        mean = weights_of(model) if number == 0 else (mean + weights_of(model)) / 2
    return mean


@pytest.mark.parametrize("is_compiled", [False, True])
def test_case_c44_when_the_model_is_wrapped_or_compiled_then_all_names_match_and_it_moves(
    is_compiled: bool,
) -> None:
    ranks = run_ranks(2, average, is_compiled)
    assert all(names == list(net().state_dict()) for names, _ in ranks)
    assert_as_one_device([weights for _, weights in ranks], average_on_one_device())
