"""Does a process note a number that a script logs and that is its own, and nothing of one that is not?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from allranks.record import layout as at
from allranks.record import logged, losses, notes, probe, process, startup, states
from allranks.record.lines import Lines
from allranks.record.writer import Writer

Noted = list[dict[str, Any]]
LOOP = "/home/ann/train.py:30 evaluate"


@pytest.fixture
def writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Writer]:
    """Rank 1 of 2, in quick steps."""
    made = Writer()
    made.open(str(tmp_path))
    made.words[at.W_WORLD_SIZE], made.words[at.W_RANK] = 2, 1
    stem = (made.path or "").removesuffix(at.SUFFIX)
    monkeypatch.setattr(process, "side_path", lambda suffix: stem + suffix)
    monkeypatch.setattr(states, "is_quick", True)
    for module in (logged, losses):
        monkeypatch.setattr(module, "_writer", made)
        module._after_fork()
    monkeypatch.setattr(logged, "_lines", Lines(made))
    notes._counts.clear()
    yield made
    for module in (logged, losses):
        module._after_fork()
    notes._counts.clear()


def noted(writer: Writer, kind: str = "logged") -> Noted:
    return [n for n in notes.read_notes(writer.path or "") if n["kind"] == kind]


class Board:
    """As SummaryWriter."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def add_scalar(self, tag: str, scalar_value: Any, global_step: int | None = None) -> None:
        self.kept.append((tag, scalar_value, global_step))

    def add_scalars(
        self, main_tag: str, tag_scalar_dict: dict[str, Any], global_step: int | None = None
    ) -> None:
        self.kept.append((main_tag, tag_scalar_dict, global_step))


@pytest.fixture
def board(writer: Writer) -> Board:
    kind = type("SummaryWriter", (Board,), dict(vars(Board)))
    logged.mark_tensorboard(SimpleNamespace(SummaryWriter=kind))
    return kind()


def loss_of(step: int) -> float:
    return 2.0 / (1 + 0.05 * step) + 0.01 * (step % 3)


def step_of(writer: Writer, value: float) -> None:
    """One step, as the mark of backward and the hook of the optimizer see it."""
    if losses.is_due():
        losses.look((torch.tensor(value),), 0)
    writer.end_step()


def train(writer: Writer, log: Callable[[int, float], None], steps: int = 60, every: int = 10) -> None:
    for step in range(steps):
        step_of(writer, loss_of(step))
        if step % every == 0:
            log(step, torch.tensor(loss_of(step)).item())


# --- the own loss ---


def test_own_loss_when_logged_twice_then_it_is_noted_once_with_its_line(writer: Writer, board: Board) -> None:
    train(writer, lambda step, loss: board.add_scalar("loss/train", loss, step))
    (one,) = noted(writer)
    assert (one["name"], one["call"], one["how"], one["scale"]) == (
        "loss/train",
        "SummaryWriter.add_scalar",
        "loss",
        1.0,
    )
    assert "test_record_logged.py" in one["line"]
    assert [n["name"] for n in noted(writer, "logs")] == ["loss/train"]
    assert len(board.kept) == 6  # and the logger was given all


@pytest.mark.parametrize("log", ["tensor", "scalars", "before", "accumulated"])
def test_own_loss_when_given_in_another_way_then_it_is_noted(writer: Writer, board: Board, log: str) -> None:
    for step in range(80):
        own, is_due = torch.tensor(loss_of(step)), step % 10 == 0
        if log == "before" and is_due:
            board.add_scalar("x", own.item())
        step_of(writer, own.item())
        if is_due and log == "tensor":
            board.add_scalar("x", own)
        elif is_due and log == "scalars":
            board.add_scalars("loss", {"train": own.item()})
        elif is_due and log == "accumulated":
            board.add_scalar("x", 4 * own.item())
    (one,) = noted(writer)
    assert one["how"] == "loss"
    assert one["scale"] == pytest.approx(4.0 if log == "accumulated" else 1.0, rel=1e-5)
    assert one["name"] == ("loss/train" if log == "scalars" else "x")


def test_mean_of_own_losses_since_the_last_call_or_in_the_pass_then_it_is_noted(
    writer: Writer, board: Board
) -> None:
    since: list[float] = []
    total, count = 0.0, 0
    board.add_scalar("first", 0.0)
    for step in range(120):
        if step % 60 == 0:
            writer.words[at.LOADER + at.L_NUMBER] += 1
            total, count = 0.0, 0
        step_of(writer, loss_of(step))
        since.append(torch.tensor(loss_of(step)).item())
        total, count = total + since[-1], count + 1
        if step % 10 == 9:
            board.add_scalar("window", sum(since) / len(since))
            since = []
        if step % 15 == 14:
            board.add_scalar("running", total / count)
    assert {n["name"]: n["how"] for n in noted(writer)} == {"window": "mean", "running": "mean"}


@pytest.mark.parametrize(
    "value",
    [
        lambda step, loss: (loss + loss_of(step) * 1.1) / 2,  # reduced
        lambda step, loss: 0.1 * 0.99**step,
        lambda step, loss: step,
        lambda step, loss: 3.5,
        lambda step, loss: float("nan"),
        lambda step, loss: "a text",
        lambda step, loss: torch.zeros(3),
    ],
    ids=["reduced", "rate", "count", "constant", "nan", "text", "several"],
)
def test_other_numbers_when_logged_then_nothing_is_noted(writer: Writer, board: Board, value: Any) -> None:
    train(writer, lambda step, loss: board.add_scalar("x", value(step, loss * (1 + 0.1 * (step % 7)))))
    assert noted(writer) == []


def test_loss_when_it_is_constant_then_nothing_is_noted(writer: Writer, board: Board) -> None:
    for _ in range(40):
        step_of(writer, 0.5)
        board.add_scalar("loss", 0.5)
    assert noted(writer) == []


def test_one_rank_when_it_is_alone_or_in_another_thread_then_nothing_is_noted(
    writer: Writer, board: Board
) -> None:
    writer.words[at.W_WORLD_SIZE] = 1
    train(writer, lambda step, loss: board.add_scalar("loss", loss))
    writer.words[at.W_WORLD_SIZE], writer.owner = 2, -1
    train(writer, lambda step, loss: board.add_scalar("loss", loss))
    assert noted(writer) == noted(writer, "logs") == []


def test_quick_steps_when_a_logger_is_in_use_then_a_limited_number_is_looked_at(
    writer: Writer, board: Board
) -> None:
    board.add_scalar("learning", 0.5)
    assert losses.which == losses.EVERY
    for step in range(logged.QUICK_LOOKS + 20):
        step_of(writer, loss_of(step))
    assert losses.follow is None
    assert losses.which == losses.SOME


def test_names_when_all_are_decided_then_losses_are_followed_no_more(writer: Writer, board: Board) -> None:
    train(writer, lambda step, loss: board.add_scalar("loss", loss), steps=41)
    assert noted(writer)
    assert losses.follow is None
    assert losses.which == losses.SOME


def test_losses_of_some_steps_then_they_are_noted_on_every_rank(writer: Writer) -> None:
    for step in range(700):
        step_of(writer, loss_of(step))
    assert [n["step"] for n in noted(writer, "loss")] == list(losses.NOTED[:3])


# --- the own share ---


def evaluate(
    writer: Writer,
    *,
    loader: int = 1,
    share: int = 80,
    length: int = 160,
    replicas: int = 2,
    batches: int = 10,
) -> None:
    """A pass over a loader has ended."""
    facts = {
        "dataset": {"length": length},
        "share": share,
        "num_replicas": replicas,
        "sampler_rank": 1 if replicas > 1 else -1,
    }
    notes.note("pass", loader=loader, line=LOOP, training=False, **facts)
    notes.note("seen", loader=loader, line=LOOP, training=False, drawn=batches)
    words, place = writer.words, at.LOADER
    words[place + at.L_NUMBER] += 1
    writer.light.drawn, words[place + at.L_LINE] = batches, writer.string(LOOP)
    words[place + at.L_STARTED_NS], words[place + at.L_ENDED_NS] = 10_000_000, 20_000_000


def test_metric_when_a_share_was_evaluated_then_it_is_noted(writer: Writer, board: Board) -> None:
    evaluate(writer)
    board.add_scalar("val/accuracy", 0.5)
    board.add_scalar("train/accuracy", 0.5)
    board.add_scalar("epoch_time", 0.5)
    (one,) = noted(writer)
    assert (one["name"], one["how"], one["loop"], one["share"], one["length"]) == (
        "val/accuracy",
        "evaluation",
        LOOP,
        80,
        160,
    )


@pytest.mark.parametrize(
    "name", ["valLoss", "test_f1", "accuracy", "eval/ppl", "Val.Loss", "mIoU", "top1_acc"]
)
def test_name_of_a_metric_then_it_is_known(name: str) -> None:
    assert logged._is_evaluated(name)


@pytest.mark.parametrize(
    "name", ["loss", "train/acc", "val/time", "latest", "evaluated_samples", "value", "mapping", "val_lr"]
)
def test_name_of_something_else_then_it_is_left_alone(name: str) -> None:
    assert not logged._is_evaluated(name)


@pytest.mark.parametrize(
    "what", ["whole", "reduced", "barrier", "trained", "goes on", "count", "two loaders"]
)
def test_metric_when_it_may_be_of_all_then_nothing_is_noted(writer: Writer, board: Board, what: str) -> None:
    if what == "two loaders":
        evaluate(writer)
        evaluate(writer, loader=2, share=160, replicas=1)
    elif what == "whole":
        evaluate(writer, share=160, replicas=1, batches=20)
    else:
        evaluate(writer)
    if what in ("reduced", "barrier"):
        writer.enter_collective(writer.string("all_reduce" if what == "reduced" else what))
    elif what == "trained":
        writer.end_step()
    elif what == "goes on":
        writer.words[at.LOADER + at.L_ENDED_NS] = 0
    board.add_scalar("val/accuracy", 80 if what == "count" else 0.5)
    assert noted(writer) == []


# --- the loggers ---


def test_wandb_and_mlflow_and_run_log_when_marked_then_what_they_are_given_is_the_same(
    writer: Writer,
) -> None:
    calls: list[Any] = []

    class Run:
        def log(self, data: dict[str, Any], step: int | None = None, *, commit: bool | None = None) -> str:
            calls.append((data, step, commit))
            return "kept"

    class JsonLines:
        def log(self, values: dict[str, Any], step: int) -> None:
            calls.append((values, step))

    fluent = SimpleNamespace(
        log_metric=lambda key, value, step=None: calls.append((key, value, step)),
        log_metrics=lambda metrics, step=None: calls.append((metrics, step)),
    )
    logged.mark_wandb(SimpleNamespace(Run=Run))
    logged.mark_mlflow(fluent)
    logged.mark_run_log(SimpleNamespace(JsonLines=JsonLines))
    assert Run().log({"a": 0.5, "b": {"c": 1.5}}, 3, commit=False) == "kept"
    fluent.log_metric("d", 0.5, step=4)
    fluent.log_metrics({"e": 0.5}, 5)
    JsonLines().log({"f": 0.5}, step=6)
    assert calls == [({"a": 0.5, "b": {"c": 1.5}}, 3, False), ("d", 0.5, 4), ({"e": 0.5}, 5), ({"f": 0.5}, 6)]
    assert [n["name"] for n in noted(writer, "logs")] == ["a", "b.c", "d", "e", "f"]


def test_logger_then_its_time_is_that_of_logging_also_when_it_raises(writer: Writer) -> None:
    phases: list[int] = []

    class Run:
        def log(self, data: Any) -> None:
            phases.append(writer.words[at.W_PHASE] & 255)
            raise KeyError("its own")

    logged.mark_wandb(SimpleNamespace(Run=Run))
    writer.mark(at.PYTHON)
    with pytest.raises(KeyError):
        Run().log({})
    assert phases == [at.LOG]
    assert writer.words[at.W_PHASE] & 255 == at.PYTHON
    assert writer.spent_ns[at.LOG] > 0


def test_logger_when_it_raises_or_is_given_something_odd_then_that_is_its_own_affair(writer: Writer) -> None:
    class Run:
        def log(self, data: Any) -> None:
            if data is None:
                raise TypeError("its own")

    logged.mark_wandb(SimpleNamespace(Run=Run))
    with pytest.raises(TypeError, match="its own"):
        Run().log(None)
    Run().log(5)
    assert noted(writer, "logs") == []


def test_loggers_when_a_script_imports_them_then_they_have_marks() -> None:
    names = {
        "torch.utils.tensorboard.writer",
        "tensorboardX.writer",
        "wandb.sdk.wandb_run",
        "mlflow.tracking.fluent",
        "allranks.metrics.sinks",
    }
    assert names <= set(startup._MARKED)
    assert set(startup._MARKED) == set(probe.MARKS)
