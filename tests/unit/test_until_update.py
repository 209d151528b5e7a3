"""Is the optimizer's state that a save copies while the training goes on that of the moment of the save?"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from allranks.ckpt import Checkpoints, Snapshot, hold
from allranks.ckpt.background import Background, Job
from allranks.ckpt.hold import Holder
from allranks.record import recorder
from allranks.train.slots import OptimizerSlot
from allranks.train.until_update import UntilUpdate


@pytest.fixture
def writer(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Saves are written only after it is set."""
    may_go = threading.Event()
    start = Background.start

    def start_later(self: Background, name: str, job: Job) -> None:
        start(self, name, lambda give_up: (may_go.wait(60), job(give_up)))

    monkeypatch.setattr(Background, "start", start_later)
    yield may_go
    may_go.set()


def make_slot(kind: Any = torch.optim.Adam) -> OptimizerSlot:
    parameters = [torch.nn.Parameter(torch.randn(n, 300_007)) for n in (1, 3)]
    slot = OptimizerSlot("main", kind(parameters, lr=0.01))
    step(slot)
    return slot


def step(slot: OptimizerSlot) -> None:
    for parameter in slot.parameters():
        parameter.grad = torch.randn_like(parameter)
    slot.optimizer.step()


def save(checkpoints: Checkpoints, until: UntilUpdate, slot: OptimizerSlot, number: int) -> None:
    state = Snapshot(step=number, training={"optimizers": {slot.name: slot.optimizer.state_dict()}})
    checkpoints.save(state, stays=until.begin(checkpoints, [slot]))


def averages(slot: OptimizerSlot) -> list[torch.Tensor]:
    return [slot.optimizer.state[p]["exp_avg"].clone() for p in slot.parameters()]


def saved_averages(checkpoints: Checkpoints) -> tuple[int, list[torch.Tensor]]:
    found = checkpoints.latest()
    assert found is not None
    state = found.training()["optimizers"]["main"]["state"]
    return found.manifest.step, [state[n]["exp_avg"] for n in sorted(state)]


@pytest.mark.parametrize("change", ["step", "load"])
def test_save_when_the_next_step_comes_before_the_writer_then_what_was_saved_is_the_state_before_it(
    tmp_path: Path, writer: threading.Event, change: str
) -> None:
    slot, until, checkpoints = make_slot(), UntilUpdate(recorder()), Checkpoints(tmp_path)
    other = make_slot().optimizer.state_dict()
    for number in (1, 2):  # the second into the same buffers
        before = averages(slot)
        save(checkpoints, until, slot, number)
        assert not checkpoints.is_settled
        step(slot) if change == "step" else slot.optimizer.load_state_dict(other)
        assert checkpoints.is_settled
        until.end()
        writer.set()
        checkpoints.wait()
        writer.clear()
        saved_at, saved = saved_averages(checkpoints)
        assert saved_at == number
        assert all(torch.equal(a, b) for a, b in zip(saved, before, strict=True))
        step(slot)
    assert not slot.optimizer._optimizer_step_pre_hooks
    writer.set()
    checkpoints.close()


def test_save_when_the_state_is_changed_by_hand_then_dropped_and_the_next_one_is_copied_at_once(
    tmp_path: Path, writer: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    slot, until, checkpoints = make_slot(), UntilUpdate(recorder()), Checkpoints(tmp_path)
    save(checkpoints, until, slot, 1)
    slot.optimizer.state[slot.parameters()[1]]["exp_avg"].zero_()
    with caplog.at_level(logging.WARNING):
        writer.set()
        checkpoints.wait()
    assert "AR619 step 1 is not saved: training.optimizers.main.state.1.exp_avg was changed" in caplog.text
    assert checkpoints.latest() is None
    before = averages(slot)
    writer.clear()
    save(checkpoints, until, slot, 2)
    assert checkpoints.is_settled
    slot.optimizer.state[slot.parameters()[0]]["exp_avg"].zero_()
    writer.set()
    checkpoints.close()
    saved_at, saved = saved_averages(checkpoints)
    assert saved_at == 2 and all(torch.equal(a, b) for a, b in zip(saved, before, strict=True))


def test_save_when_the_next_update_is_skipped_then_it_is_complete_before_the_one_after(
    tmp_path: Path, writer: threading.Event
) -> None:
    slot, until, checkpoints = make_slot(), UntilUpdate(recorder()), Checkpoints(tmp_path)
    before = averages(slot)
    save(checkpoints, until, slot, 1)
    until.end()  # after an update without a step: fp16 overflowed, or all weights were 0
    assert checkpoints.is_settled
    step(slot)
    writer.set()
    checkpoints.close()
    assert all(torch.equal(a, b) for a, b in zip(saved_averages(checkpoints)[1], before, strict=True))


def test_copy_when_it_is_interrupted_then_nobody_waits_and_it_does_not_pass_for_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    holder = Holder()
    holder.begin()
    holder.copy_later(torch.ones(4), "x")
    holder.finish()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(hold.ctypes, "memmove", interrupted)
        holder.settle()
    assert holder.settle() == ("x",)


def test_save_when_the_optimizer_is_not_of_torch_then_copied_at_once(
    tmp_path: Path, writer: threading.Event
) -> None:
    class Own(torch.optim.Adam):
        pass

    slot, until, checkpoints = make_slot(Own), UntilUpdate(recorder()), Checkpoints(tmp_path)
    save(checkpoints, until, slot, 1)
    assert checkpoints.is_settled
    writer.set()
    checkpoints.close()


def test_holder_when_two_threads_settle_then_both_return_after_the_last_byte() -> None:
    holder, source = Holder(), torch.randn(5, 1_000_003)
    for _ in range(5):
        source.add_(1)
        holder.begin()
        copied = holder.copy_later(source, "x")
        holder.finish()
        assert not holder.is_settled
        thread = threading.Thread(target=holder.settle)
        thread.start()
        assert holder.settle() == ()
        assert torch.equal(copied, source)
        source.add_(1)  # in good faith: all was copied
        thread.join()
        assert holder.settle() == ()
