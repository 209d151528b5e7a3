"""Does a run say what of a checkpoint does not fit, and what is used wrongly? One process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from allranks import ckpt
from allranks.core.errors import CheckpointError, UsageError
from support.job import Job, Stop, stop_at


@pytest.fixture
def stopped(tmp_path: Path) -> Path:
    """A run directory whose run ended after update 5 of 6, saved after 2 and 4."""
    job = Job(tmp_path / "run")
    job.after_step = stop_at(5)
    with pytest.raises(Stop):
        job.train()
    return tmp_path / "run"


# -- what does not fit -------------------------------------------------------------------------------------------------------


def test_model_of_another_width_is_refused_with_both_shapes(
    stopped: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job(stopped)
    job.width = 5
    with pytest.raises(
        CheckpointError, match=r"AR605 .*model 'model'[\s\S]*0.weight: \[3, 2\] in the checkpoint, \[5, 2\]"
    ):
        job.train()


class Other(Job):
    """A job whose parts differ from what was saved."""

    change = ""

    def make(self, run: Any) -> None:
        names = {"name": "net"} if self.change == "model name" else {}
        self.model = run.model(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)), **names)
        parameters: Any = list(self.model.parameters())
        if self.change == "groups":
            parameters = [{"params": parameters[:2]}, {"params": parameters[2:]}]
        if self.change == "order":
            parameters = parameters[::-1]
        self.sgd = run.optimizer(torch.optim.SGD(parameters, lr=0.01, momentum=0.9))
        if self.change == "scheduler":
            run.scheduler(torch.optim.lr_scheduler.StepLR(self.sgd, 1))
        if self.change == "ema":
            run.ema(self.model)
        if self.change == "track":
            run.track(thing=self.sgd)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("model name", "models in the checkpoint that this script has not registered: model"),
        ("groups", r"parameter groups of \[4\] parameters, this one of \[2, 2\]"),
        ("order", r"momentum_buffer of parameter 0 has shape \[3, 2\], the parameter \[1\]"),
        ("scheduler", "has 0 schedulers per update, this script 1"),
        ("ema", "averages of this script that the checkpoint does not have: ema"),
        ("track", "tracked objects of this script that the checkpoint does not have: thing"),
    ],
)
def test_parts_when_they_differ_from_the_saved_ones_are_named(stopped: Path, change: str, said: str) -> None:
    job = Other(stopped)
    job.change = change
    with pytest.raises(CheckpointError, match=rf"AR612 [\s\S]*{said}"):
        job.train()


def test_precision_when_changed_from_fp16_is_named(tmp_path: Path) -> None:
    job = Job(tmp_path / "run", precision="fp16")
    job.after_step = stop_at(3)
    with pytest.raises(Stop):
        job.train()
    with pytest.raises(CheckpointError, match=r"AR612 [\s\S]*loss scalers in the checkpoint"):
        Job(tmp_path / "run").train()


def test_parts_when_not_strict_are_taken_as_far_as_they_fit(
    stopped: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = Other(stopped)
    job.change = "ema"
    job.before = lambda run: run.resume(strict=False)
    job.train()
    assert job.seen[0] == (1, 5)
    assert "averages of this script that the checkpoint does not have: ema" in caplog.text


# -- wrong use ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong", [{"steps": 0}, {"steps": 1.5}, {"epochs": True}, {"minutes": -1}, {"keep": 0}]
)
def test_save_every_when_given_nonsense_refuses(tmp_path: Path, wrong: dict[str, Any]) -> None:
    job = Job(tmp_path / "run")
    job.save_every = wrong
    with pytest.raises(UsageError, match="AR611"):
        job.train()


def test_save_every_when_the_training_has_begun_is_too_late(tmp_path: Path) -> None:
    job = Job(tmp_path / "run")
    job.after_step = lambda run: run.save_every(steps=1)
    with pytest.raises(UsageError, match="AR623"):
        job.train()


def test_track_when_wrong_says_what(tmp_path: Path) -> None:
    for track, said in (
        (lambda run: run.track(x=3), "a int has no state_dict"),
        (lambda run: run.track(x=nn.Linear(1, 1)) or run.track(x=nn.Linear(1, 1)), "was called before"),
    ):
        job = Job(tmp_path / "run")
        job.before = track
        with pytest.raises(UsageError, match=f"AR624 .*{said}"):
            job.train()
    job = Job(tmp_path / "run")
    job.after_step = lambda run: run.track(x=nn.Linear(1, 1))
    with pytest.raises(UsageError, match=r"AR624 .*after the training has begun"):
        job.train()


# -- weights from elsewhere --------------------------------------------------------------------------------------------------


def test_load_weights_takes_files_of_other_tools_and_their_prefixes(tmp_path: Path, stopped: Path) -> None:
    """C85, C86."""
    net = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    wrapped = {f"module._orig_mod.{k}": v for k, v in net.state_dict().items()}
    torch.save({"epoch": 3, "state_dict": wrapped}, tmp_path / "lightning.pt")
    torch.save(wrapped, tmp_path / "plain.pt")
    for path in (tmp_path / "lightning.pt", tmp_path / "plain.pt"):
        other = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
        ckpt.load_weights(other, path)
        assert all(torch.equal(a, b) for a, b in zip(net.parameters(), other.parameters(), strict=True))
    saved = stopped / "checkpoints" / "step-00000004"
    for path in (saved, saved / "model.safetensors"):
        ckpt.load_weights(net, path)
        assert torch.equal(net[0].weight, ckpt.load(saved).weights()["0.weight"])
    with pytest.raises(CheckpointError, match=r"AR605 .*lightning\.pt does not fit this Linear"):
        ckpt.load_weights(nn.Linear(2, 3), tmp_path / "lightning.pt")
    with pytest.raises(CheckpointError, match="AR613"):
        ckpt.load_weights(net, tmp_path / "none.pt")
