"""Does the thread that ticks end when it is told to, once or twice, and is nothing kept of a process group that is gone?"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest

from allranks.record import closing, joining, process, states, ticking
from allranks.record.page import PageReader
from allranks.record.writer import Writer

NAME = "allranks-record"


@pytest.fixture
def at_exit(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Callable[..., None], Any]]]:
    """What is to be called when the process ends; called at the end of the test."""
    found: list[tuple[Callable[..., None], Any]] = []
    monkeypatch.setattr(ticking, "_pace", None)
    monkeypatch.setattr(ticking.atexit, "register", lambda *call: found.append(cast(Any, call)))
    yield found
    for stop, thread in found:
        stop(thread)
        thread.join(30.0)


class Group:
    """A process group in which much was issued."""

    def _get_sequence_number_for_group(self) -> int:
        return 992


def ticks() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == NAME]


def test_thread_when_stopped_twice_then_it_has_ended_and_another_may_be_started(at_exit: Any) -> None:
    before = len(ticks())
    ticking.start()
    ticking.start()
    ((stop, thread),) = at_exit
    assert len(ticks()) == before + 1
    for _ in range(2):
        stop(thread)
        thread.join(30.0)
        assert not thread.is_alive()
    ticking.start()
    assert len(at_exit) == 2 and at_exit[1][1].is_alive()


def test_answer_when_the_process_ends_in_the_middle_of_it_then_it_is_waited_for(
    at_exit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, ended = threading.Event(), threading.Event()

    def answer(_: int) -> None:
        begun.set()
        ended.wait(0.1)
        ended.set()

    monkeypatch.setattr(ticking, "_answer", answer)
    monkeypatch.setattr(ticking, "_answering", None)
    ticking.start()
    ticking._answer_aside(1)
    assert begun.wait(30.0)
    ((stop, thread),) = at_exit
    stop(thread)
    assert ended.is_set()


def test_thread_when_the_process_was_forked_then_the_child_may_start_one_and_end_both(at_exit: Any) -> None:
    ticking.start()
    before = ticking._pace
    ticking._forget()  # as in the child
    ticking.start()
    assert before is not None and ticking._pace is not before and len(at_exit) == 2
    before.stop()


FORKS = """
import os, sys, time
from allranks.record import layout as at, process, ticking
process.open_page(sys.argv[1])
ticking.start()
writer = process.WRITER
writer.mark(at.PYTHON)
writer.next_looked = writer.next_timed = 1 << 40
writer.may_be_light = True
writer.end_step()
time.sleep(0.05)  # its thread is where it waits
child = os.fork()
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
with open("/proc/self/maps") as file:
    mapped = [line.split()[-1] for line in file if ".page" in line]
opened = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
is_own = {*mapped} == {writer.path} == {path for path in opened if ".page" in path}
os._exit(0 if is_own and os.getpid() == writer.words[at.W_PID] else 3)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc")
@pytest.mark.parametrize("is_compiled", [False, True])
def test_child_when_forked_while_the_thread_waits_then_it_does_not_keep_its_parents_page(
    tmp_path: Path, is_compiled: bool
) -> None:
    env = {**os.environ, "ALLRANKS_NO_EXTENSION": "" if is_compiled else "1"}
    done = subprocess.run([sys.executable, "-c", FORKS, str(tmp_path)], env=env, timeout=60, check=False)
    assert done.returncode == 0


def test_group_when_another_is_joined_then_the_numbers_of_the_one_before_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = Writer()
    record.open(str(tmp_path))
    for module in (joining, states):
        monkeypatch.setattr(module, "_writer", record)
    monkeypatch.setattr(process, "WRITER", record)
    monkeypatch.setattr(ticking, "start", lambda: None)
    monkeypatch.setattr(closing, "register", lambda: None)
    monkeypatch.setattr(states, "world", Group())
    for name in ("noted", "next_note_step", "is_quick"):
        monkeypatch.setattr(states, name, getattr(states, name))
    states.note_step_end()
    assert record.path is not None
    page = PageReader(record.path)
    assert page.glance().group_seq == 992
    c10d = SimpleNamespace(
        is_initialized=lambda: True, _get_default_group=SimpleNamespace, get_rank=lambda: 0, get_world_size=lambda: 2
    )  # fmt: skip
    joining.has_joined(cast(ModuleType, c10d))
    assert page.glance().group_seq == -1  # not known yet; the number of another group is of no use
    page.close()
