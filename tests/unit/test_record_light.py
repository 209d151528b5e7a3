"""Do steps whose marks take no clock say where the process is, and is their time shared out so that nothing is lost?"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from allranks.record import layout as at
from allranks.record import lines, process, ticking, writer
from allranks.record.light import LONG_NS, STALE_NS, Shares
from allranks.record.page import PageReader, Phase
from allranks.record.writer import Writer

MS = 1_000_000
STEP_MS = {at.DATA: 0.2, at.FORWARD: 0.4, at.BACKWARD: 0.8, at.OPTIMIZER: 0.1, at.PYTHON: 0.5}


class Clock:
    """The time that a writer sees."""

    def __init__(self) -> None:
        self.ns = 10**12

    def __call__(self) -> int:
        return self.ns


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(writer, "monotonic_ns", made)
    return made


def opened(tmp_path: Path) -> tuple[Writer, PageReader]:
    made = Writer()
    made.open(str(tmp_path))
    made.mark(at.PYTHON)
    assert made.path is not None
    return made, PageReader(made.path)


def train(record: Writer, clock: Clock, steps: int, parts: dict[int, float] = STEP_MS) -> int:
    """So many steps, as the marks of probe_training.py write them; how many had no clock."""
    light = 0
    for step in range(steps):
        if step % 50 == 0:
            record.flush()
        light += record.light is not None
        for phase, ms in parts.items():
            if phase == at.PYTHON:
                clock.ns += int(ms * MS)
            elif phase != at.COLLECTIVE and (words := record.light) is not None:
                words[at.W_PHASE] = phase
                clock.ns += int(ms * MS)
                words[at.W_PHASE] = at.PYTHON
            else:
                before = record.mark(phase)
                clock.ns += int(ms * MS)
                record.mark(before)
        record.end_step(clock.ns)
    return light


def until_light(record: Writer, clock: Clock) -> memoryview:
    """Quick steps until one has light marks: the words for them."""
    record.may_be_light = True
    train(record, clock, 100)
    while record.light is None:
        train(record, clock, 1)
    return record.light


def times_of(record: Writer, page: PageReader) -> dict[Phase, int]:
    record.flush()
    found = page.read().times
    assert found is not None
    return found.phase_ns


def test_quick_steps_then_some_have_clocks_and_each_phase_its_time(tmp_path: Path, clock: Clock) -> None:
    record, page = opened(tmp_path)
    began = clock.ns
    assert train(record, clock, 20) == 0  # it is not known yet that they are quick
    record.may_be_light = True
    assert 700 < train(record, clock, 800) < 780
    spent = times_of(record, page)
    for phase, ms in STEP_MS.items():
        assert spent[Phase(phase)] == pytest.approx(820 * ms * MS, rel=0.01)
    assert sum(spent.values()) - spent[Phase.START] == pytest.approx(clock.ns - began, abs=1000)
    page.close()


def test_steps_when_they_change_then_the_shares_follow_and_no_time_grows_smaller(
    tmp_path: Path, clock: Clock
) -> None:
    record, page = opened(tmp_path)
    record.may_be_light = True
    train(record, clock, 2000)
    before = times_of(record, page)
    train(record, clock, 3000)
    between = times_of(record, page)
    train(record, clock, 3000, {at.DATA: 1.9, at.PYTHON: 0.1})
    after = times_of(record, page)
    assert all(before[p] <= between[p] <= after[p] for p in Phase)
    assert after[Phase.DATA] - between[Phase.DATA] == pytest.approx(3000 * 1.9 * MS, rel=0.25)
    assert after[Phase.FORWARD] - between[Phase.FORWARD] < 0.25 * 3000 * 0.4 * MS
    page.close()


def test_step_without_clocks_when_something_lasts_then_it_is_counted_exactly(
    tmp_path: Path, clock: Clock
) -> None:
    record, page = opened(tmp_path)
    until_light(record, clock)
    before = record.mark(at.CHECKPOINT)
    assert record.light is None
    clock.ns += 700 * MS
    record.mark(before)
    train(record, clock, 1)
    assert record.light is not None or record.is_looked
    record.phase(at.EVALUATE)
    train(record, clock, 0)
    clock.ns += 300 * MS
    record.leave()
    spent = times_of(record, page)
    assert (spent[Phase.CHECKPOINT], spent[Phase.EVALUATE]) == (700 * MS, 300 * MS)
    page.close()


def test_collective_in_each_step_then_what_comes_after_it_is_given_no_time_of_what_was_before(
    tmp_path: Path, clock: Clock
) -> None:
    record, page = opened(tmp_path)
    record.may_be_light = True
    parts = {at.DATA: 0.2, at.FORWARD: 0.4, at.BACKWARD: 0.8, at.COLLECTIVE: 0.1, at.OPTIMIZER: 0.5}
    assert train(record, clock, 2000, parts) < 60
    spent = times_of(record, page)
    for phase, ms in parts.items():
        assert spent[Phase(phase)] == pytest.approx(2000 * ms * MS, rel=0.02)
    assert train(record, clock, 1000) > 700  # and without it the marks are light again
    page.close()


def test_steps_when_they_are_counted_from_the_beginning_again_then_they_are_looked_at() -> None:
    record = Writer()
    record.mark(at.PYTHON)
    record.may_be_light = True  # of a loop of the script's own before
    for step in (*range(1, 1001), *range(6)):
        record.set_step(step)
        assert record.light is None and record.is_looked
    assert record.is_timed or record.next_timed < 200


def test_long_step_among_those_looked_at_then_it_does_not_count_for_the_others() -> None:
    shares = Shares()
    spent = [0] * at.NUM_PHASES
    for number in range(20):
        shares.begins(spent)
        spent[at.FORWARD] += MS
        spent[at.DATA] += MS if number != 10 else 900 * MS  # one stall of the loader
        shares.ended(spent)
    shared = shares.share_out(100 * MS)
    assert shared[at.DATA] == pytest.approx(50 * MS, rel=0.01)
    assert sum(shared) == 100 * MS
    assert shares.share_out(90 * MS) == shared  # two readings of one moment may come in the wrong order


def test_reader_when_marks_have_no_clock_then_each_is_seen(tmp_path: Path, clock: Clock) -> None:
    record, page = opened(tmp_path)
    words = until_light(record, clock)
    seen = {page.glance().marks}
    for phase in (at.DATA, at.FORWARD, at.BACKWARD):
        words[at.W_PHASE] = phase
        glance = page.glance()
        assert glance.phase == Phase(phase) and glance.marks not in seen
        seen.add(glance.marks)
    page.close()


def test_step_without_clocks_when_it_does_not_end_then_the_tick_thread_finds_its_line(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, page = opened(tmp_path)
    monkeypatch.setattr(process, "WRITER", record)
    monkeypatch.setattr(process, "LINES", lines.Lines(record))
    monkeypatch.setattr(ticking, "monotonic_ns", clock)
    words = until_light(record, clock)
    words[at.W_PHASE] = at.BACKWARD | record.string("/a/train.py:1 the line of an earlier step") << 8
    clock.ns += LONG_NS - 1
    on_another_thread(ticking._look_at_light)
    assert record.light is not None
    clock.ns += 1
    on_another_thread(ticking._look_at_light)
    found = page.read()
    assert record.light is None and found.phase == Phase.BACKWARD
    assert found.line.startswith(f"{__file__}:") and "on_another_thread" in found.line
    assert found.phase_since_ns == clock.ns - LONG_NS  # the end of the step before
    page.close()


def test_steps_without_clocks_when_they_become_slower_then_none_looks_like_a_long_phase(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, page = opened(tmp_path)
    monkeypatch.setattr(process, "WRITER", record)
    monkeypatch.setattr(ticking, "monotonic_ns", clock)
    record.may_be_light = True
    train(record, clock, 100)
    record.next_looked = record.next_timed = 10_000  # nothing else ends them
    while record.light is None:
        train(record, clock, 1)
    for _ in range(40):
        train(record, clock, 2, {at.FORWARD: 45.0})
        ticking._look_at_light()
        assert clock.ns - page.read().phase_since_ns <= STALE_NS
    page.close()


def on_another_thread(look: Callable[[], Any]) -> None:
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
