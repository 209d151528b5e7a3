"""Does a signal that reaches only the launcher save the job and end it with 0, and does the same command go on from there?"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from support.command import Command, StartCommand, command_path

JOB = Path(__file__).parents[1] / "support" / "resume_job.py"
UPDATES = 1200


def start(start_command: StartCommand, folder: Path, *more: str) -> Command:
    return start_command(
        command_path("allranks"), "run", "--nproc", "2", "--run-dir", folder / "run", *more,
        JOB, folder / "result", str(UPDATES), "100000",
        cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def wait_for_update(folder: Path, command: Command, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and command.process.poll() is None:
        place = folder / "result" / "progress-0"
        words = place.read_text().split() if place.exists() else []
        if len(words) == 2 and int(words[1]) > 0:
            return
        time.sleep(0.02)
    raise AssertionError(f"no update came\n{command.out}\n{command.err}")


def results(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / "result" / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.e2e
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "number", [signal.SIGTERM]
)  # SIGUSR1 takes the same way; see ranks/test_ckpt_signals.py
def test_job_when_only_the_launcher_is_signalled_saves_ends_with_0_and_goes_on(
    start_command: StartCommand, tmp_path: Path, number: signal.Signals
) -> None:
    command = start(start_command, tmp_path)
    wait_for_update(tmp_path, command, 90)
    command.send(number)
    done = command.finish(60)
    assert done.code == 0 and not done.left_behind, done.story()
    assert "stopped after update" in done.err, done.story()
    (saved,) = (tmp_path / "run" / "checkpoints").iterdir()
    step = json.loads((saved / "manifest.json").read_text())["step"]
    assert 0 < step < UPDATES
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert {"checkpoint", "stop"} <= {event["event"] for event in events}
    again = start(start_command, tmp_path).finish(120)
    assert again.code == 0, again.story()
    assert f"update {step}, epoch" in again.err, again.story()
    assert all(row["rows"] == UPDATES for row in results(tmp_path)), "every update was done once"


RAISES = """
import sys, torch, allranks
with allranks.start(global_batch_size=4) as run:
    model = run.model(torch.nn.Linear(2, 1))
    run.optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    loader = run.loader(torch.utils.data.TensorDataset(torch.ones(400, 2)), shuffle=True)
    run.save_every(steps=5)
    for _ in run.epochs(1):
        for (x,) in loader:
            run.step(model(x).sum())
            if run.updates == 12 and run.rank == 1:
                raise ValueError("at the same step each time")
"""


@pytest.mark.e2e
@pytest.mark.timeout(240)
def test_restarts_when_a_traceback_comes_back_at_the_same_step_stop_and_say_so(
    start_command: StartCommand, tmp_path: Path
) -> None:
    (tmp_path / "raises.py").write_text(RAISES)
    command = start_command(
        command_path("allranks"), "run", "--nproc", "2", "--max-restarts", "9", "--run-dir", "run", "raises.py",
        cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    done = command.finish(200)
    assert done.code == 1 and not done.left_behind, done.story()
    assert "AR044 the same failure twice in a row, ValueError at" in done.err, done.story()
    assert "at step 12: another restart would end the same way" in done.err, done.story()
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert [e["step"] for e in events if e["event"] == "resume"] == [10], (
        "one restart, from the last checkpoint"
    )
