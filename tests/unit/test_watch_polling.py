"""Is a rank that stands still read whole only when something may have changed, and does its row grow older all the same?"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from allranks.core.job import Job, RankProcess
from allranks.record import page
from allranks.record.values import Phase
from allranks.record.writer import Writer
from allranks.watch import polling
from allranks.watch.evidence import Record
from allranks.watch.polling import Poll


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One for each whole page that was read."""
    made: list[str] = []
    record_of = polling.record_of

    def noted(found: page.Record) -> Record:
        made.append("read")
        return record_of(found)

    monkeypatch.setattr(polling, "record_of", noted)
    monkeypatch.setattr(polling, "WHOLE_S", 1e9)
    return made


def poll_of(tmp_path: Path) -> tuple[Poll, Writer]:
    log = tmp_path / "rank0.log"
    log.write_text("printed")
    rank = RankProcess(0, 0, os.getpid(), 0.0, log)
    job = Job("id", tmp_path / "run", tmp_path, "here", 0, True, 1, 0, (rank,), ())
    writer = Writer()
    writer.open(str(tmp_path))
    return Poll(job), writer


def test_rank_when_it_stands_in_a_collective_then_read_once_and_older_at_each_look(
    tmp_path: Path, reads: list[str]
) -> None:
    poll, writer = poll_of(tmp_path)
    with writer.collective("barrier"):
        first = poll.rows()[0]
        assert (first.op, first.phase) == ("barrier", "collective")
        deadline = time.monotonic() + 20
        while (later := poll.rows()[0]).call_s < first.call_s + 0.02:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert later.phase_s > first.phase_s and later.tail == first.tail
        assert len(reads) == 1
    moved = poll.rows()[0]
    assert (moved.op, moved.phase, len(reads)) == ("", "start", 1)  # a glance is enough
    poll.close()


@pytest.mark.parametrize(
    "change",
    [
        lambda writer: writer.enter_collective(writer.string("all_reduce")),
        lambda writer: writer.set_step(7),
        lambda writer: writer.exited(page.ExitKind.EXCEPTION, 1),
    ],
    ids=["a collective", "a step", "an exception"],
)
def test_rank_when_it_makes_no_mark_but_something_changed_then_read_again(
    tmp_path: Path, reads: list[str], change: Callable[[Writer], object]
) -> None:
    poll, writer = poll_of(tmp_path)
    writer.phase(Phase.EVALUATE)
    for _ in range(3):
        poll.rows()
    assert len(reads) == 1
    change(writer)
    for _ in range(2):  # a step is a move: seen at a glance first
        poll.rows()
    assert len(reads) == 2
    poll.close()


def test_rank_when_the_agent_sees_it_end_then_its_row_says_so_at_once(
    tmp_path: Path, reads: list[str]
) -> None:
    poll, _ = poll_of(tmp_path)
    assert not poll.rows()[0].is_over and not poll.rows()[0].is_over
    poll.ended(0, is_well=True)
    row = poll.rows()[0]
    assert row.is_over and row.has_ended_well
    poll.close()


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The poll's time, in seconds."""
    clock = [1000.0]
    monkeypatch.setattr(polling.time, "monotonic", lambda: clock[0])
    return clock


def test_poll_when_all_ranks_move_then_quiet_until_it_is_time_for_a_look(
    tmp_path: Path, now: list[float]
) -> None:
    poll, writer = poll_of(tmp_path)
    assert not poll.is_quiet()  # nobody was looked at
    poll.rows()
    for step in range(1, 5):
        writer.set_step(step)
        assert poll.is_quiet(), step
        now[0] += 0.1
    writer.set_step(5)
    now[0] += 0.1
    assert not poll.is_quiet()
    poll.rows()
    assert poll.is_quiet()
    poll.close()


def test_poll_when_a_rank_stands_then_quiet_for_a_moment_only(tmp_path: Path, now: list[float]) -> None:
    poll, writer = poll_of(tmp_path)
    poll.rows()
    writer.set_step(1)
    assert poll.is_quiet()
    now[0] += 0.1
    assert poll.is_quiet()
    now[0] += 0.1
    assert not poll.is_quiet()
    writer.set_step(2)
    assert poll.is_quiet()
    poll.close()


@pytest.mark.parametrize("letter", ["T", "t", "Z", ""])
def test_poll_when_a_rank_that_stands_is_not_at_work_then_not_quiet(
    tmp_path: Path, letter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    poll, writer = poll_of(tmp_path)
    poll.rows()
    writer.set_step(1)
    assert poll.is_quiet() and poll.is_quiet()
    monkeypatch.setattr(polling.proc, "state", lambda _: letter)
    assert not poll.is_quiet()
    poll.close()


def test_poll_when_a_page_cannot_be_read_then_not_quiet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: page.PageReader) -> tuple[bytes, bool]:
        raise OSError

    poll, _ = poll_of(tmp_path)
    poll.rows()
    monkeypatch.setattr(page.PageReader, "beat", refuse)
    assert not poll.is_quiet()
    poll.close()


@pytest.mark.parametrize(
    "change",
    [
        lambda poll, writer: writer.exited(page.ExitKind.EXCEPTION, 1),
        lambda poll, writer: poll.ended(0, is_well=True),
        lambda poll, writer: poll.forget_times(),
    ],
    ids=["an exception", "its end", "a look is asked for"],
)
def test_poll_when_there_is_something_to_see_then_not_quiet(
    tmp_path: Path, change: Callable[[Poll, Writer], object]
) -> None:
    poll, writer = poll_of(tmp_path)
    poll.rows()
    writer.set_step(1)
    assert poll.is_quiet()
    change(poll, writer)
    writer.set_step(2)
    assert not poll.is_quiet()
    poll.close()


def test_rank_when_it_puts_itself_in_its_own_place_then_its_new_page_is_read(tmp_path: Path) -> None:
    poll, before = poll_of(tmp_path)
    before.end_step()
    assert poll.rows()[0].step == 1
    after = Writer()
    after.open(str(tmp_path))  # as after os.exec: the same pid
    for _ in range(3):
        after.end_step()
    poll._discovered_at = 0.0
    assert poll.rows()[0].step == 3
    Path(str(after.path)).unlink()  # its last words are still there
    after.end_step()
    poll._discovered_at = 0.0
    poll.forget_times()
    assert poll.rows()[0].step == 4
    poll.close()
    for writer in (before, after):
        writer.close()
