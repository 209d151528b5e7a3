"""Does a process note what a loss is the mean of and what it is multiplied with, and leave alone what is not as simple?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from allranks.record import layout as at
from allranks.record import losses, notes, origin, passes, states, weights
from allranks.record.weights import Mean, read
from allranks.record.writer import Writer

Noted = list[dict[str, Any]]
MODEL = nn.Linear(4, 3)
X, T, Y = torch.randn(5, 4), torch.rand(5, 3), torch.tensor([0, 1, 2, -100, 1])


class Own(torch.autograd.Function):
    """A loss of the user's own."""

    @staticmethod
    def forward(ctx: Any, given: Tensor) -> Tensor:
        return given.sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0].expand(5, 3)


@pytest.mark.parametrize(
    "make, mean",
    [
        (lambda o: F.cross_entropy(o, Y) / 4, Mean("NllLoss", 4, 0.25, True)),
        (lambda o: F.cross_entropy(o, Y, reduction="sum") / 20, Mean("NllLoss", 4, 0.2, True)),
        (lambda o: F.cross_entropy(o, Y, weight=torch.ones(3)), Mean("NllLoss", 5, 1.0, False)),
        (lambda o: F.cross_entropy(o.T[None], Y[None]), Mean("NllLoss2D", 4, 1.0, True)),
        (lambda o: F.cross_entropy(o[0], Y[0]), Mean("NllLoss", 1, 1.0, True)),
        (lambda o: F.cross_entropy(o[..., None, None].expand(5, 3, 2, 2), torch.zeros(5, 2, 2).long()), Mean("NllLoss2D", 5, 1.0, False)),
        (lambda o: 5 * F.mse_loss(o, T).squeeze() / 48, Mean("MseLoss", 15, 5 / 48, False)),
        (lambda o: ((o - T) ** 2).mean() * torch.tensor(0.5), Mean("Mean", 15, 0.5, False)),
        (lambda o: o.square().mean(1).mean(0).mean(), Mean("Mean", 5, 1.0, False)),
        (lambda o: o.sum() / 30, Mean("Sum", 15, 0.5, False)),
        (lambda o: F.binary_cross_entropy_with_logits(o, T), Mean("BinaryCrossEntropyWithLogits", 15, 1.0, False)),
        (lambda o: -F.smooth_l1_loss(o, T), Mean("SmoothL1Loss", 15, 1.0, False)),
    ],
)  # fmt: skip
def test_loss_that_is_a_mean_then_what_of_and_its_weight_are_read(
    make: Callable[[Tensor], Tensor], mean: Mean
) -> None:
    found = read(make(MODEL(X)))
    assert found is not None
    assert (found.op, found.items, found.is_of_targets) == (mean.op, mean.items, mean.is_of_targets)
    assert found.weight == pytest.approx(mean.weight)


@pytest.mark.parametrize(
    "make",
    [
        lambda o: F.cross_entropy(o, Y) + o.square().mean(),
        lambda o: F.cross_entropy(o, Y, label_smoothing=0.1),
        lambda o: (F.cross_entropy(o, Y, reduction="none") * torch.ones(5)).sum() / 4,
        lambda o: 1 / F.mse_loss(o, T),
        lambda o: F.mse_loss(o, T) * torch.tensor(2.0, requires_grad=True),
        lambda o: F.mse_loss(o, T) * 0.0,
        lambda o: F.mse_loss(o, T).exp(),
        lambda o: o[0, 0],
        lambda o: Own.apply(o),
        lambda o: F.cross_entropy(o, torch.full((5,), -100)),
        lambda o: torch.tensor(1.0, requires_grad=True),
    ],
)
def test_loss_that_is_more_than_a_mean_then_nothing_is_read(make: Callable[[Tensor], Tensor]) -> None:
    assert read(make(MODEL(X))) is None


def test_loss_inside_a_checkpoint_then_what_it_keeps_is_not_asked_for() -> None:
    calls = []

    def inner(x: Tensor) -> Tensor:
        calls.append(1)
        return F.cross_entropy(MODEL(x), Y)

    loss = checkpoint(inner, X, use_reentrant=False) / 3  # pyright: ignore[reportOptionalOperand]
    assert read(loss) == Mean("NllLoss", 5, pytest.approx(1 / 3), False)  # type: ignore[arg-type]
    assert len(calls) == 1
    loss.backward()  # what was unpacked once may not be unpacked again


# --- a job ---


class Job:
    """Rank 1 of 2, which trains one model."""

    def __init__(self, writer: Writer) -> None:
        self.writer = writer

    def micro_step(self, count: int, weight: float = 1.0, line: int = 0) -> None:
        x = torch.randn(count, 4)
        loss = MODEL(x).square().mean() * weight
        self.writer.words[at.W_MICRO_STEP] += 1
        origin.remember(MODEL, (x,), loss)
        losses.look((loss,), line << 8)

    def step(self, *counts: int, weight: float = 1.0) -> None:
        for count in counts:
            self.micro_step(count, weight)
        self.writer.end_step()


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Noted]:
    found: Noted = []
    monkeypatch.setattr(
        notes, "_write", lambda _, kind, values: found.append({"kind": kind, **values}) if kind != "loss" else None
    )  # fmt: skip
    monkeypatch.setattr(notes, "has_room", lambda _: True)
    monkeypatch.setattr(states, "known_replicas", lambda: [MODEL])
    monkeypatch.setattr(weights.compat, "keeps_equal", lambda ddp, group: True)
    monkeypatch.setattr(passes, "batch", None)
    weights._after_fork()
    yield found
    weights._after_fork()
    losses._after_fork()


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch, noted: Noted) -> Job:
    writer = Writer()
    writer.words[at.W_WORLD_SIZE], writer.words[at.W_RANK] = 2, 1
    for module in (losses, weights):
        monkeypatch.setattr(module, "_writer", writer)
    return Job(writer)


def test_steps_when_looked_at_then_each_has_its_counts_and_weights(job: Job, noted: Noted) -> None:
    for _ in range(3):
        job.step(2, 30, weight=0.5)
    job.micro_step(2)
    assert [(n["step"], n["op"], n["lines"]) for n in noted] == [(k, "Mean", [""]) for k in (1, 2, 3)]
    assert noted[0]["rows"] == [[0, 2, 0, 6, 0.5, 0], [0, 30, 0, 90, 0.5, 0]]


def test_steps_of_a_long_job_then_a_few_are_noted_the_same_ones_on_each_rank(job: Job, noted: Noted) -> None:
    for _ in range(900):
        job.step(4)
    assert [n["step"] for n in noted] == [1, 2, 3, 5, 13, 18, 26, 34, 39, 47, 60, 68]
    assert weights.due == states.NEVER
    assert not origin.wants_rows


@pytest.mark.parametrize("forwards", [2, 0])
def test_backward_without_a_forward_of_its_own_then_the_step_is_not_noted(
    job: Job, noted: Noted, forwards: int
) -> None:
    for _ in range(5):
        job.writer.words[at.W_MICRO_STEP] = forwards - 1
        job.step(4)
    assert noted == []
    assert weights.due == states.NEVER  # asked no more


def test_two_models_or_one_that_is_not_averaged_then_nothing_is_noted(
    job: Job, noted: Noted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(states, "known_replicas", lambda: [MODEL, MODEL])
    for _ in range(5):
        job.step(4)
    assert noted == []


def test_library_that_steps_then_nothing_is_noted(job: Job, noted: Noted) -> None:
    job.writer.set_step(0)
    for _ in range(5):
        job.step(4, 8)
    assert noted == []


def test_last_batch_of_a_pass_and_loader_then_they_are_noted(
    job: Job, noted: Noted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passes, "batch", [7, 8, 9])
    job.writer.words[at.LOADER + at.L_LENGTH] = job.writer.words[at.LOADER + at.L_DRAWN] = 4
    job.step(3)
    job.writer.words[at.LOADER + at.L_NUMBER] = 2
    job.micro_step(3)
    job.writer.words[at.LOADER + at.L_NUMBER] = 3
    job.step(3)
    job.step(3)
    assert [n["rows"] for n in noted] == [
        [[0, 3, 3, 9, 1.0, 1]],
        [[0, 3, 3, 9, 1.0, 1], [1, 3, 3, 9, 1.0, 1]],
    ]
    assert noted[1]["lines"] == ["", ""]


@pytest.mark.parametrize(
    "inputs, result, rows",
    [
        ((X,), X, 5),
        (({"ids": X},), X, 5),
        ((), {"loss": torch.tensor(1.0), "logits": torch.zeros(7, 2)}, 7),
        (("text",), torch.tensor(1.0), 0),
    ],
)
def test_samples_of_a_forward_then_they_are_the_first_dimension(inputs: Any, result: Any, rows: int) -> None:
    origin.wants_rows = True
    origin.remember(MODEL, inputs, result)
    assert origin.rows == rows


@pytest.mark.parametrize("length_ms", [0.5, 1.5, 1.6, 5.0])
def test_steps_when_quick_then_each_that_all_ranks_look_at_is_noted(length_ms: float) -> None:
    step, due, looked, noted = weights.FIRST, weights.FIRST, [], set[int]()
    while step < 4096:
        step = at.next_timed(step, int(length_ms * 1e6))
        looked.append(step)
    while due < 4096:
        due = weights._next(due)
        noted.add(due)
    of_quickest = [s for s in looked if at.preference(s) >= (7 if s < at.EARLY_STEPS else 8)]
    assert len(of_quickest) > 12 and set(of_quickest) <= noted
