"""Is a process asked for its stacks only where that does no harm, often enough, and within the time given?"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from allranks.core.job import Job, NodeInfo
from allranks.record import frames, page
from allranks.record.writer import Writer
from allranks.watch import asking, proc
from allranks.watch.asking import Asker, Target
from allranks.watch.rows import Row
from allranks.watch.verdict import Place
from allranks.watch.watcher import Watcher

PID = 4_190_000  # above the kernel's pid_max: nobody's
LINE = json.dumps(
    [{"thread_name": "MainThread", "frames": [{"filename": "/home/ann/train.py", "line": 7, "name": "main"}]}]
)


class Machine:
    """A process as the kernel would show it, and what is done to it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, threads: str = "SS") -> None:
        self.threads = threads
        self.signalled: list[int] = []
        self.outside: list[float] = []
        """The seconds that each py-spy was given."""
        monkeypatch.setattr(proc, "state", lambda _: self.threads[0])
        monkeypatch.setattr(proc, "thread_states", lambda _: {PID + i: s for i, s in enumerate(self.threads)})
        monkeypatch.setattr(proc, "wchan", lambda _: "futex_wait")
        monkeypatch.setattr(proc, "catches", lambda *_: True)
        monkeypatch.setattr(asking.os, "kill", lambda pid, _: self.signalled.append(pid))
        monkeypatch.setattr(asking, "ANSWER_S", 0.0)
        monkeypatch.setattr(asking, "py_spy", self._py_spy)

    def _py_spy(self, pid: int, within_s: float) -> str:
        self.outside.append(within_s)
        return LINE


@pytest.fixture
def target(tmp_path: Path) -> Target:
    writer = Writer()
    writer.open(str(tmp_path))
    assert writer.path is not None
    found = page.read_page(Path(writer.path))
    return Target(PID, replace(found, stack_signal=40, tick_ns=0))


@pytest.mark.parametrize(
    ("threads", "is_signalled"), [("SS", True), ("SD", True), ("SR", False), ("RS", False)]
)
def test_process_when_one_of_its_threads_runs_then_it_is_read_from_outside_only(
    threads: str, is_signalled: bool, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(monkeypatch, threads=threads)
    found = Asker(5.0).stacks([target])
    assert machine.signalled == ([PID] if is_signalled else [])
    assert found[PID][0] == "py-spy"  # also where the signal was not answered


@pytest.mark.parametrize("is_over", [False, True])
def test_process_that_can_take_its_lock_then_it_is_signalled_only_where_the_job_ends_anyway(
    is_over: bool, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(monkeypatch)
    monkeypatch.setattr(asking, "ITSELF_S", 0.1)
    found = Asker(5.0, is_over=is_over).stacks([ticking(target, 0.1)])
    assert machine.signalled == ([PID] if is_over else [])
    assert found[PID][0] == "py-spy"  # neither was answered


def test_process_that_sleeps_and_answers_itself_then_it_is_neither_signalled_nor_read_from_outside(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers(target, monkeypatch, number=3)
    machine = Machine(monkeypatch)
    how, stacks = Asker(5.0).stacks([ticking(target, 0.1)])[PID]
    assert (how, machine.signalled, machine.outside) == ("itself", [], [])
    assert [f.line for s in stacks if s.is_main for f in s.frames] == [7]


def test_process_when_the_time_is_up_then_it_is_not_asked(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(monkeypatch)
    assert Asker(0.0).stacks([target]) == {}
    assert (machine.signalled, machine.outside) == ([], [])


def test_process_when_read_from_outside_then_a_few_times_only(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(monkeypatch, threads="RS")
    asker = Asker(30.0)
    found = [asker.stacks([target]) for _ in range(asking.MOST_OUTSIDE + 2)]
    assert [bool(f) for f in found] == [True] * asking.MOST_OUTSIDE + [False] * 2
    assert all(within_s <= asking.OUTSIDE_S for within_s in machine.outside)


def test_process_when_looked_at_for_more_then_one_reading_from_outside_is_left(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    Machine(monkeypatch, threads="RS")
    asker = Asker(30.0)
    found = [asker.stacks([target], is_extra=True) for _ in range(asking.MOST_OUTSIDE + 1)]
    assert [bool(f) for f in found] == [True] * (asking.MOST_OUTSIDE - 1) + [False] * 2
    assert asker.stacks([target])
    assert Asker(asking.RESERVE_S).stacks([target], is_extra=True) == {}


def answers(target: Target, monkeypatch: pytest.MonkeyPatch, *, number: int) -> None:
    """No py-spy; the process writes this answer when it is asked for answer 3."""
    Machine(monkeypatch, threads="RS")
    monkeypatch.setattr(asking, "py_spy", lambda *_: "")
    said = {
        "answer": number,
        "stacks": [["work", False, []], ["MainThread", True, [["/a/train.py", 7, "main"]]]],
    }

    def ask(path: str) -> int:
        Path(path).with_suffix(".fr.json").write_text(json.dumps(said))
        return 3

    monkeypatch.setattr(asking.page, "ask", ask)


def ticking(target: Target, ago_s: float) -> Target:
    assert target.page is not None
    return Target(PID, replace(target.page, tick_ns=time.monotonic_ns() - int(ago_s * 1e9)))


def test_process_that_runs_when_there_is_no_py_spy_then_it_answers_itself(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers(target, monkeypatch, number=3)
    how, stacks = Asker(5.0).stacks([ticking(target, 0.1)])[PID]
    assert how == "itself"
    assert [s.frames for s in stacks if s.is_main] == [(Place("/a/train.py", 7, "main"),)]


def test_process_when_it_cannot_take_its_lock_or_answers_late_then_nothing_is_taken_for_an_answer(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "ITSELF_S", 0.1)
    answers(target, monkeypatch, number=3)
    assert Asker(5.0).stacks([ticking(target, 0.8)]) == {}
    answers(target, monkeypatch, number=2)  # to an earlier question
    assert Asker(5.0).stacks([ticking(target, 0.1)]) == {}


def test_stacks_when_a_process_reads_its_own_then_lines_and_the_main_thread() -> None:
    found: list[list[Any]] = []
    thread = threading.Thread(target=lambda: found.extend(frames.stacks()), name="asks")
    thread.start()
    thread.join()
    ((_, _, lines),) = [s for s in found if s[1]]
    assert any(file == __file__ and function.startswith("test_stacks") for file, _, function in lines)
    assert "asks" not in [s[0] for s in found]


class Talk:
    """Keeps what is asked."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    def ask(self, request: dict[str, Any], node_ranks: Sequence[int] | None = None) -> None:
        self.asked.append(request)


def test_node_when_its_answer_is_to_an_earlier_question_then_it_is_not_taken_for_this_one(
    tmp_path: Path,
) -> None:
    nodes = tuple(NodeInfo(n, f"gpu-{n}", (n,)) for n in range(2))
    job = Job("j", tmp_path, tmp_path, "gpu-0", 0, True, 2, 0, (), nodes)
    watcher, talk = Watcher(), Talk()
    watcher.start(job, talk)
    for _ in range(2):
        assert not watcher.last_look()
    watcher.on_bundle(1, {"ranks": [], "number": talk.asked[0]["number"]})
    watcher.on_bundle(1, {})
    assert watcher._bundles == {}
    watcher.on_bundle(1, {"ranks": [], "number": talk.asked[1]["number"]})
    assert list(watcher._bundles) == [1]
    watcher.close()


def test_watcher_when_something_is_under_way_then_not_quiet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = {n: NodeInfo(n, f"gpu-{n}", (n,)) for n in range(2)}
    job = Job("j", tmp_path, tmp_path, "gpu-0", 0, True, 2, 0, (), tuple(nodes.values()))
    watcher = Watcher()
    assert not watcher.is_quiet(nodes)
    watcher.start(job, Talk())
    monkeypatch.setattr(watcher._poll, "is_quiet", lambda: True)
    assert watcher.is_quiet(nodes)
    for notes, is_quiet in ((100, False), (100, True)):  # seen, and looked at when they are left alone
        watcher._trigger.look({0: Row(0, "R", notes=notes)}, now=5.0 + is_quiet)
        assert watcher.is_quiet(nodes) == is_quiet
    assert not watcher.is_quiet({**nodes, 1: replace(nodes[1], is_lost=True)})
    watcher.last_look()  # the other node is asked
    assert not watcher.is_quiet(nodes)
    watcher.close()
    assert not watcher.is_quiet(nodes)


def test_watcher_when_another_attempt_begins_then_the_files_of_the_one_before_are_closed(
    tmp_path: Path,
) -> None:
    watcher = Watcher()
    job = Job("j", tmp_path, tmp_path, "gpu-0", 0, True, 2, 0, (), ())
    watcher.start(job, Talk())
    first = watcher._poll._timeline._file
    watcher.start(job, Talk())
    assert first.closed and not watcher._poll._timeline._file.closed
    watcher.close()
