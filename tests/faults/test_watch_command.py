"""Does `allranks watch` say from outside what a job does, and decide a kept incident again?"""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from support.command import RunCommand, StartCommand, command_path

HERE = Path(__file__).parent


def test_watch_when_given_a_kept_incident_then_it_is_decided_again(allranks: RunCommand) -> None:
    done = allranks("watch", HERE / "fixtures" / "deadlock.json")
    assert done.code == 1, done.story()
    assert done.out.startswith("AR223 rank 1 on vm waits for a lock")
    told = json.loads(allranks("watch", HERE / "fixtures" / "deadlock.json", "--json").out)
    assert told["verdict"]["code"] == "AR223"


def test_watch_when_nothing_is_there_then_it_says_so(allranks: RunCommand, tmp_path: Path) -> None:
    done = allranks("watch", tmp_path)
    assert (done.code, done.out) == (3, "")
    assert "no live rank" in done.err
    assert allranks("watch").code == 2


@pytest.mark.timeout(120)
def test_watch_when_pointed_at_a_process_of_a_hung_job_then_it_gives_the_verdict(
    allranks: RunCommand, start_command: StartCommand, tmp_path: Path
) -> None:
    env = {
        "FAULT_MARK": str(tmp_path / "mark"),
        "OMP_NUM_THREADS": "1",
        "ALLRANKS_HOME": str(tmp_path / "home"),
    }
    script = HERE / "scripts" / "sleeps.py"
    command = start_command(
        command_path("allranks"), "run", "--nproc", "2", script, cwd=HERE / "scripts", env=env
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "mark").exists():
        assert time.monotonic() < deadline, command.err
        time.sleep(0.1)
    command.wait_for("explain AR226", 10)
    done = allranks("watch", "--pid", str(command.process.pid), cwd=HERE / "scripts")
    assert done.code == 1, done.story()
    assert "AR226 rank 1" in done.out and "sleeps.py:8" in done.out
