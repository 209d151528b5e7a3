"""When does a run save, and from what does it resume? One process; see ranks/test_ckpt_resume.py for several."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import allranks
from allranks import ckpt
from allranks.core.errors import CheckpointError, UsageError
from support.job import DATA, Job, Stop, stop_at


@pytest.fixture
def stopped(tmp_path: Path) -> Path:
    """A run directory whose run ended after update 5 of 6, saved after 2 and 4."""
    job = Job(tmp_path / "run")
    job.after_step = stop_at(5)
    with pytest.raises(Stop):
        job.train()
    return tmp_path / "run"


# -- when --------------------------------------------------------------------------------------------------------------------


def test_run_without_a_word_saves_nothing_in_a_short_training(tmp_path: Path) -> None:
    job = Job(tmp_path / "run")
    job.save_every = None
    job.train()
    assert job.steps() == []


def test_steps_and_epochs_when_due_save_and_the_end_saves_once(tmp_path: Path) -> None:
    job = Job(tmp_path / "run")
    job.num_epochs, job.save_every = 3, {"steps": 4, "epochs": 2, "keep": None}
    job.train()
    # Update 4 and 8 by steps, 6 by two epochs, 9 as the end.
    assert job.steps() == ["step-00000004", "step-00000006", "step-00000008", "step-00000009"]
    again = Job(tmp_path / "run")
    again.num_epochs = 3
    assert again.train().seen == [] and again.weights() == job.weights()


def test_minutes_when_over_save_in_between(tmp_path: Path) -> None:
    job = Job(tmp_path / "run")
    job.save_every = {"minutes": 60}
    job.after_step = lambda run: run._pause.ask_to_save() if run.updates == 3 else None
    job.train()
    assert job.steps() == ["step-00000003", "step-00000006"]


def test_save_when_called_in_the_loop_includes_what_the_loop_does_after_it(tmp_path: Path) -> None:
    """C80: the learning rate of a scheduler that the loop steps by hand comes back, whatever the order of lines."""

    def make(job: Job) -> Job:
        job.save_every = None
        job.before = lambda run: (
            setattr(job, "steplr", torch.optim.lr_scheduler.StepLR(job.sgd, 1, 0.5))
            or run.track(steplr=job.steplr)
        )
        return job

    job = make(Job(tmp_path / "run"))

    def after_step(run: Any) -> None:
        if run.updates == 2:
            run.save(blocking=True)
        if run.updates == 4:
            raise Stop
        job.steplr.step()

    job.after_step = after_step
    with pytest.raises(Stop):
        job.train()
    again = make(Job(tmp_path / "run"))
    rates: list[float] = []
    again.after_step = lambda run: (again.steplr.step(), rates.append(again.sgd.param_groups[0]["lr"]))
    again.train()
    assert again.seen[0] == (0, 3)
    assert rates == [0.01 * 0.5**n for n in (3, 4, 5, 6)]


def test_save_when_called_after_the_loop_is_of_the_complete_epoch(tmp_path: Path) -> None:
    job = Job(tmp_path / "run")
    job.save_every = None
    job.after_loop = lambda run: run.save() if run.epoch == 0 else None
    job.train()
    found = ckpt.load(tmp_path / "run" / "checkpoints" / "step-00000003")
    assert found.manifest.epoch == 1, "resumed there, the code after the loop is not done twice"


def test_save_when_called_outside_the_epochs_saves_at_once(tmp_path: Path) -> None:
    job = Job(tmp_path / "run")
    job.save_every = None
    job.before = lambda run: run.save(blocking=True) or setattr(job, "there", job.steps())
    job.train()
    assert job.there == ["step-00000000"]


def test_best_when_logged_keeps_that_checkpoint(tmp_path: Path) -> None:
    job = Job(tmp_path / "run")
    job.num_epochs = 4
    job.save_every = {"epochs": 1, "keep": 1, "best": "accuracy", "best_is": "highest"}
    job.after_loop = lambda run: run.log(accuracy=[0.1, 0.9, 0.3, 0.2][run.epoch])
    job.train()
    assert job.steps() == ["step-00000006", "step-00000012"]


def test_writer_when_it_fails_ends_the_run_at_the_next_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(tmp_path / "run")

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    def after_step(run: Any) -> None:
        if run.updates == 3:
            run._checkpoints._background.wait()

    job.before = lambda run: monkeypatch.setattr(os, "fsync", full)
    job.after_step = after_step
    with pytest.raises(CheckpointError, match=r"AR608 .*No space left on device"):
        job.train()
    assert job.run.updates == 3


# -- resuming ----------------------------------------------------------------------------------------------------------------


def test_run_when_started_again_goes_on_after_the_newest_checkpoint(stopped: Path, tmp_path: Path) -> None:
    """C79, C97: a restart resumes by itself, in the order of the epoch it was in."""
    whole = Job(tmp_path / "whole").train()
    again = Job(stopped).train()
    assert again.seen == [(1, 5), (1, 6)] and again.weights() == whole.weights()


def test_optimizer_when_made_last_still_gets_its_state(stopped: Path) -> None:
    """C82: state is restored when everything is there, not when the file is read."""

    class Late(Job):
        def make(self, run: Any) -> None:
            self.model = run.model(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)))
            run.save_every(steps=2)
            self.sgd = run.optimizer(torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9))

    job = Late(stopped)
    momenta: list[int] = []
    job.after_loop = lambda run: momenta.append(len(job.sgd.state))
    job.before = lambda run: run.resume() and momenta.append(len(job.sgd.state))
    job.save_every = None
    job.train()
    assert momenta == [4, 4]


def test_newest_checkpoint_when_damaged_is_named_and_the_one_before_taken(
    stopped: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (stopped / "checkpoints" / "step-00000004" / "training.pt").write_bytes(b"")
    with caplog.at_level(logging.INFO):
        again = Job(stopped).train()
    assert again.seen[0] == (0, 3)
    assert "checkpoint passed over: step-00000004: training.pt is truncated" in caplog.text
    assert "resumed from" in caplog.text


def test_all_checkpoints_when_damaged_are_no_reason_to_begin_anew_in_silence(stopped: Path) -> None:
    for file in (stopped / "checkpoints").glob("*/manifest.json"):
        file.unlink()
    with pytest.raises(CheckpointError, match=r"AR600[\s\S]*step-00000004[\s\S]*step-00000002"):
        Job(stopped).train()
    assert Job(stopped, resume="never").train().seen[0] == (0, 1)


@pytest.mark.parametrize("path", ["", "checkpoints", "checkpoints/step-00000002"])
def test_resume_when_given_a_path_takes_it_unless_the_run_has_its_own(
    stopped: Path, tmp_path: Path, path: str
) -> None:
    job = Job(tmp_path / "new", resume=stopped / path).train()
    first = 3 if path.endswith("2") else 5
    assert job.seen[0][1] == first
    assert Job(tmp_path / "new", resume=stopped / path).train().seen == []


def test_resume_when_the_path_has_no_checkpoint_says_so(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere", tmp_path / "nowhere" / "step-00000001"):
        with pytest.raises(CheckpointError, match="AR613 there is no checkpoint at"):
            Job(tmp_path / "run", resume=path).train()


def test_loop_of_its_own_beside_a_checkpoint_is_told_that_it_does_not_resume(stopped: Path) -> None:
    """C97: restart is not resume."""

    def loop(run: Any, job: Job) -> None:
        for x, _ in run.loader(DATA, shuffle=True, name="loader"):
            run.step(job.model(x).square().mean())

    for call_resume in (False, True):
        job = Job(stopped)
        with allranks.start(stopped, global_batch_size=4, device="cpu") as run:
            job.make(run)
            if call_resume:
                loader = run.loader(DATA, shuffle=True)
                assert run.resume() is not None and run.updates == 4
                assert len(list(loader)) == 2, "the loader goes on too"
            else:
                with pytest.raises(
                    UsageError, match=r"AR620 training began at update 0, beside step-00000004"
                ):
                    loop(run, job)


def test_stop_during_an_evaluation_saves_the_state_of_the_loops_end_before_it_is_over(tmp_path: Path) -> None:
    """C95: the evaluation may outlast the grace time; what comes after the loop is done again, once."""

    def make(run_dir: Path) -> Job:
        job = Job(run_dir)
        job.save_every, job.test, job.passes = None, None, 0

        def before(run: Any) -> None:
            job.test = run.loader(DATA)
            job.steplr = torch.optim.lr_scheduler.StepLR(job.sgd, 1, 0.5)
            run.track(steplr=job.steplr)

        def after_loop(run: Any) -> None:
            job.steplr.step()
            torch.rand(1)
            job.passes += 1
            for number, _ in enumerate(job.test):
                if job.stop and run.epoch == 0 and number == 1:
                    run._pause.ask_to_stop("SIGTERM")
                if job.stop and run.epoch == 0 and number == 2:
                    run._checkpoints._background.wait()
                    raise Stop  # the time is over in the middle of the evaluation

        job.before, job.after_loop = before, after_loop
        return job

    whole, cut, again = make(tmp_path / "whole"), make(tmp_path / "run"), make(tmp_path / "run")
    whole.stop, cut.stop, again.stop = False, True, False
    whole.train()
    rest = torch.get_rng_state()
    with pytest.raises(Stop):
        cut.train()
    assert cut.steps() == ["step-00000003-early"]
    again.train()
    assert again.seen[0] == (1, 4) and again.passes == 2
    assert again.weights() == whole.weights() and torch.equal(torch.get_rng_state(), rest)
    assert again.sgd.param_groups[0]["lr"] == whole.sgd.param_groups[0]["lr"] == 0.0025


# -- what was logged -----------------------------------------------------------------------------------------------------------


def test_log_when_resumed_tells_of_every_update_once_and_in_order(tmp_path: Path) -> None:
    job = Job(tmp_path / "run", tensorboard=False)

    def after_step(run: Any) -> None:
        run.log(loss=run.updates)
        if run.updates == 3 and not is_again:
            run._checkpoints.wait()
            raise Stop

    job.before = lambda run: run.log(begun=1)
    job.after_loop = lambda run: run.log(accuracy=run.epoch)
    job.after_step, is_again = after_step, False
    job.save_every = {"steps": 1}
    with pytest.raises(Stop):
        job.train()
    # The save after update 2 is what is left; update 3 was logged, and is lost.
    is_again = True
    job.train()
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["loss"] for row in rows if "loss" in row] == [1, 2, 3, 4, 5, 6]
    assert [row["accuracy"] for row in rows if "accuracy" in row] == [0, 1]
    assert sum("begun" in row for row in rows) == 2, "what this process logged before it resumed stays"
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert [e["lines_cut"] for e in events if e["event"] == "resume"] == [1]


def test_log_of_another_run_when_resumed_from_it_stays_as_it_is(stopped: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "metrics.jsonl").write_text('{"step": 9}\n')
    Job(tmp_path / "other", resume=stopped).train()
    assert (tmp_path / "other" / "metrics.jsonl").read_text() == '{"step": 9}\n'
