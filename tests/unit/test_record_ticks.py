"""What does a tick of the record's thread bring into the page, in quick steps and others, and which pages does it remove?"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from time import monotonic_ns
from typing import Any, cast

import pytest

from allranks.record import layout as at
from allranks.record import lines, pace, process, states, ticking
from allranks.record.light import STALE_NS
from allranks.record.page import PageReader, Phase, Record
from allranks.record.writer import Writer

LIGHT = pace.LIGHT_EVERY


class Group:
    """A process group that counts how often it is asked."""

    asked = 0

    def _get_sequence_number_for_group(self) -> int:
        self.asked += 1
        return 991 + self.asked


class Ticks:
    """Stands for the lock that is waited for: before each tick the next of these happens, then it is over."""

    def __init__(self, happens: list[Callable[[], object]]) -> None:
        self.happens = happens

    def acquire(self, *, timeout: float) -> bool:
        assert timeout == 0.1
        if self.happens:
            self.happens.pop(0)()
            return False
        return True


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Writer:
    """The record of this process; its marks are light, in the middle of quick steps."""
    made = Writer()
    made.open(str(tmp_path))
    monkeypatch.setattr(process, "WRITER", made)
    monkeypatch.setattr(process, "LINES", lines.Lines(made))
    monkeypatch.setattr(states, "world", Group())
    monkeypatch.setattr(ticking, "stand_back", lambda: None)  # it is this thread that ticks
    made.line_of = process.LINES.of
    made.mark(at.PYTHON)
    made.may_be_light, made.next_looked, made.next_timed = True, 1 << 20, 1 << 20
    made.end_step()
    assert made.light.is_on
    made.words[at.W_SEEN] = at.DATA  # of a time before
    return made


def tick(record: Writer, happens: list[Callable[[], object]]) -> list[Record]:
    """What the page says after each tick."""
    assert record.path is not None
    found: list[Record] = []
    with PageReader(record.path) as page:

        def then(happen: Callable[[], object]) -> Callable[[], object]:
            return lambda: (found.append(page.read()), happen())

        paced = pace.PlainPace(pace.EVERY_US, LIGHT, STALE_NS, pace.WORDS)
        cast(Any, paced)._lock = Ticks([happens[0], *(then(h) for h in happens[1:])])
        ticking._tick(paced)
        found.append(page.read())
    return found


def steps(record: Writer) -> None:
    """Some of them end, with light marks."""
    record.light.step = record.light.step_words[0] = record.step + 20
    record.words[at.W_SINCE_NS] = (
        monotonic_ns() + 10**12
    )  # one was looked at just now, however slow the test is


def test_quick_steps_then_each_tick_is_counted_and_few_bring_times_and_place(record: Writer) -> None:
    found = tick(record, [lambda: steps(record)] * (2 * LIGHT + 1))
    assert [page.ticks for page in found] == list(range(1, 2 * LIGHT + 2)) and all(p.is_light for p in found)
    assert len({page.tick_ns for page in found}) == len(found)
    assert found[0].seen_phase == Phase.PYTHON and "/allranks/" not in found[0].seen_line  # at once
    brought = [page.times.step if page.times is not None else None for page in found]
    first, second = 1 + 20 * LIGHT, 1 + 40 * LIGHT
    assert brought == [21] * (LIGHT - 1) + [first] * LIGHT + [second] * 2
    assert states.world.asked == 0  # how many collectives were issued, steps note


def test_quick_steps_when_one_does_not_end_then_each_tick_brings_all_from_the_second_on_that_sees_it(
    record: Writer,
) -> None:
    found = tick(record, [lambda: steps(record), lambda: steps(record), lambda: None, lambda: None])
    assert [page.is_light for page in found] == [True, True, False, False]
    times = [page.times for page in found if page.times is not None]
    assert [t.step for t in times] == [21, 21, 41, 41] and len({t.at_ns for t in times}) == 3
    assert [page.group_seq for page in found] == [-1, -1, 992, 993]


@pytest.mark.parametrize(("ended", "is_shown"), [(5, True), (11, False)])
def test_quick_steps_when_only_half_as_many_end_then_it_is_shown_at_once_where_the_process_is(
    record: Writer, ended: int, is_shown: bool
) -> None:
    def some(number: int) -> None:
        steps(record)
        record.light.step += number - 20
        record.words[at.W_SEEN] = at.DATA  # where it was at another tick

    found = tick(record, [lambda: some(20), lambda: some(20), lambda: some(ended)])
    assert [page.seen_phase for page in found[:2]] == [Phase.PYTHON, Phase.DATA]
    assert (found[2].seen_phase == Phase.PYTHON) is is_shown


@pytest.mark.parametrize(("ago_ms", "is_next"), [(-60_000, False), (600, True)])
def test_steps_with_whole_marks_when_few_are_looked_at_and_one_takes_long_then_the_next_is(
    record: Writer, ago_ms: int, is_next: bool
) -> None:
    record.end_light(monotonic_ns())
    step = record.step
    ended = monotonic_ns() - ago_ms * 1_000_000
    tick(record, [lambda: record.words.__setitem__(at.STEP_ENDS + step % at.NUM_STEP_ENDS, ended)])
    assert (record.next_looked == record.next_timed == step + 2) is is_next


@pytest.mark.parametrize("is_light", [True, False])
@pytest.mark.parametrize(("ago_ms", "is_next"), [(-60_000, False), (900, True)])
def test_steps_when_they_are_still_quick_but_the_last_look_is_long_ago_then_one_is_looked_at(
    record: Writer, ago_ms: int, is_next: bool, is_light: bool
) -> None:
    def slower() -> None:
        steps(record)
        record.light.asked_ns = monotonic_ns() + 10**12  # and they were quick
        record.timed_ns = monotonic_ns() - ago_ms * 1_000_000
        if not is_light:
            record.end_light(monotonic_ns())
            record.words[at.STEP_ENDS + record.step % at.NUM_STEP_ENDS] = monotonic_ns() + 10**12

    tick(record, [slower])
    assert (record.next_looked == record.next_timed == record.step + 2) is is_next
    assert record.light.is_on is (is_light and not is_next)


def test_other_steps_then_each_tick_brings_all(record: Writer) -> None:
    record.end_light(monotonic_ns())
    found = tick(record, [lambda: record.mark(at.FORWARD)] * 3)
    assert [page.group_seq for page in found] == [992, 993, 994]
    assert len({page.times.at_ns for page in found if page.times is not None}) == 3


def test_pages_of_dead_children_when_old_then_removed_and_no_others(record: Writer, tmp_path: Path) -> None:
    with subprocess.Popen(["true"]) as child:
        child.wait()
    minute = 61 * 10**9

    def page(pid: int, parent: int, age_ns: int) -> Path:
        other = Writer()
        other.words[at.W_PARENT], other.words[at.W_SINCE_NS] = parent, monotonic_ns() - age_ns
        path = tmp_path / f"{pid}{at.SUFFIX}"
        path.write_bytes(bytes(other.buffer))
        return path

    notes = (tmp_path / f"{child.pid}{at.NOTES_SUFFIX}", tmp_path / "notes.page")
    for path in notes:
        path.write_text("{}\n")
    for parent, age_ns in (
        (os.getppid(), minute),
        (os.getpid(), 0),
    ):  # another's child; the agent may still read it
        path = page(child.pid, parent, age_ns)
        ticking._sweep()
        assert path.exists()
    path.write_bytes(b"cut short")
    ticking._sweep()
    alive = page(os.getppid(), os.getpid(), minute)
    assert path.exists() and alive.exists()
    path = page(child.pid, os.getpid(), minute)
    ticking._sweep()
    assert not path.exists() and not notes[0].exists() and alive.exists() and notes[1].exists()
    assert record.path is not None and Path(record.path).exists()
