"""Does a scheduler's warning wait for ranks that cannot take it yet?"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from support.command import StartCommand, command_path

STARTS_SLOWLY = """
import os, signal, sys, time
rank = os.environ["RANK"]
def save(number, frame):
    open(f"saved{rank}", "w").write(signal.Signals(number).name)
    sys.exit(0)
open(f"started{rank}", "w").close()
while not os.path.exists("go"): time.sleep(0.02)
signal.signal(signal.SIGUSR1, save)
time.sleep(60)
"""


def wait_for(*found: Callable[[], object], timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while not all(one() for one in found):
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.e2e
def test_warning_when_ranks_have_no_handler_yet_then_it_waits_for_one(
    start_command: StartCommand, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(STARTS_SLOWLY)
    command = start_command(command_path("allranks"), "run", "--nproc", "2", "--no-watch", "train.py")
    wait_for(*((tmp_path / f"started{rank}").exists for rank in (0, 1)))
    command.send(signal.SIGUSR1)
    # The stop file appears as the signal is passed on.
    wait_for(lambda: list(Path("/dev/shm").glob(f"allranks-*-{command.process.pid}/stop")))
    (tmp_path / "go").touch()
    done = command.finish(30)
    assert done.code == 0 and not done.left_behind, done.story()
    assert [(tmp_path / f"saved{rank}").read_text() for rank in (0, 1)] == ["SIGUSR1"] * 2
