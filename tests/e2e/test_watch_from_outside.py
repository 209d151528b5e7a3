"""Does a job that torchrun started get a verdict from outside, and does a rank that uses allranks.start() say its last words itself?"""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from support.command import Command, RunCommand, StartCommand, command_path

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

SCRIPT = Path(__file__).parent / "scripts" / "hangs.py"
LINE = next(n for n, line in enumerate(SCRIPT.read_text().splitlines(), 1) if "time.sleep(600)" in line)


def torchrun(start_command: StartCommand, folder: Path, *args: str) -> Command:
    """The script, on 2 ranks, once it hangs."""
    command = start_command(
        command_path("torchrun"), "--standalone", "--nproc-per-node", "2", SCRIPT, *args,
        cwd=folder, env={"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    deadline = time.monotonic() + 90
    while "hangs" not in command.out:
        assert time.monotonic() < deadline and command.process.poll() is None, command.err
        time.sleep(0.1)
    return command


@pytest.mark.parametrize("has_record", [False, True], ids=["plain", "start"])
def test_watch_when_a_job_of_torchrun_hangs_then_it_gives_the_verdict(
    has_record: bool, start_command: StartCommand, allranks: RunCommand, tmp_path: Path
) -> None:
    command = torchrun(start_command, tmp_path, *(["600"] if has_record else []))
    where = ["--run", tmp_path / "run"] if has_record else ["--pid", str(command.process.pid)]
    deadline = time.monotonic() + 60
    while (done := allranks("watch", *where)).code == 0 and time.monotonic() < deadline:
        pass  # not long enough yet
    assert done.code == 1, done.story()
    assert re.match(r"AR226 rank 1 on \S+ sleeps; rank 0 waits for it", done.out), done.story()
    assert f"hangs.py:{LINE}" in done.out and "rank 0 waits in the gradient all-reduce" in done.out


def test_rank_when_the_others_do_not_come_under_torchrun_then_it_says_where_it_is(
    start_command: StartCommand, tmp_path: Path
) -> None:
    command = torchrun(start_command, tmp_path, "3")
    command.wait_for("in <module>", 60)  # the end of its stack
    said = command.err
    assert re.search(r"\[allranks\] rank 0 of 2 on host \S+: backward failed: .*rank 1", said), said
    assert re.search(r"at: +\S*hangs.py:\d+ train, [\d.]+ s inside, step 3", said), said
    assert "Current thread" in said and "the cause is on a rank that did not come" in said
