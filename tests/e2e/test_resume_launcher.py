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
        if (folder / "result" / "progress").exists():
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
