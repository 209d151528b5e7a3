"""Do steps whose marks take no clock say where the process is, and is their time shared out so that nothing is lost?"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from allranks.record import layout as at
from allranks.record import lines, process, ticking, writer
from allranks.record.light import STALE_NS, Shares, is_within, phase_on, stands_for
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
        light += record.light.is_on
        for phase, ms in parts.items():
            if phase == at.PYTHON or (phase != at.COLLECTIVE and record.light.is_on):
                clock.ns += int(ms * MS)
            else:
                before = record.mark(phase)
                clock.ns += int(ms * MS)
                record.mark(before)
        end_step(record, clock)
    return light


def end_step(record: Writer, clock: Clock) -> None:
    """As the hook of an optimizer."""
    if not record.light.is_on:
        record.end_step(clock.ns)
        return
    record.light.step = record.light.step_words[0] = record.step + 1
    record.light.micro_steps = 0
    record.end_light_step()


def until_light(record: Writer, clock: Clock) -> None:
    """Quick steps until one has light marks."""
    record.may_be_light = True
    train(record, clock, 100)
    while not record.light.is_on:
        train(record, clock, 1)


def until_light_again(record: Writer, clock: Clock) -> None:
    """And one with clocks, so that its end is known; the next one has light marks."""
    until_light(record, clock)
    while not record.is_looked:
        train(record, clock, 1)
    train(record, clock, 1)
    assert record.light.is_on


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
    assert 700 < train(record, clock, 800) < 790
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
    assert not record.light.is_on and before == at.PYTHON
    clock.ns += 700 * MS
    record.mark(before)
    train(record, clock, 2)
    assert record.light.is_on or record.is_looked
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


def test_light_marks_when_they_lasted_before_they_were_ended_then_the_next_step_has_them_again() -> None:
    shares = Shares()
    assert shares.may_be_light(10)
    assert shares.may_be_light(42)  # the end of a pass had ended them
    assert shares.may_be_light(74)
    found = [shares.may_be_light(step) for step in range(75, 90)]  # and now each step does
    assert found == [False, True, False, False, False, True, *[False] * 7, True, False]


def test_steps_when_they_are_counted_from_the_beginning_again_then_they_are_looked_at() -> None:
    record = Writer()
    record.mark(at.PYTHON)
    record.may_be_light = True  # of a loop of the script's own before
    for step in range(1, 1001):
        record.set_step(step)
    assert record.next_looked > 6
    for step in range(3):
        record.set_step(step)
        assert record.step == step and record.words[at.W_STEP] == step
        assert record.next_looked < step + 100 and record.next_timed < step + 200


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


def test_reader_when_marks_have_no_clock_then_it_sees_each_step_and_that_no_phase_is_kept(
    tmp_path: Path, clock: Clock
) -> None:
    record, page = opened(tmp_path)
    until_light(record, clock)
    seen = set()
    for _ in range(3):
        assert page.read().is_light
        seen.add((page.glance().marks, page.glance().step))
        record.light.step = record.light.step_words[0] = record.step + 1
    assert len(seen) == len({marks for marks, _ in seen}) == 3
    record.mark(at.CHECKPOINT)
    assert not page.read().is_light and page.read().phase == Phase.CHECKPOINT
    page.close()


def test_ends_of_steps_without_clocks_when_a_clock_comes_then_they_lie_evenly_before_it(
    tmp_path: Path, clock: Clock
) -> None:
    record, page = opened(tmp_path)
    until_light_again(record, clock)
    first, began = record.step, clock.ns
    record.next_looked = record.next_timed = first + 9
    train(record, clock, 8, {at.FORWARD: 3.0})
    ends = page.read().step_ends_ns
    assert record.is_looked and ends[-9:] == tuple(began + k * 3 * MS for k in range(9))
    page.close()


def test_collective_when_marks_were_light_then_what_it_lies_in_is_found_on_the_stack(
    tmp_path: Path, clock: Clock
) -> None:
    record, page = opened(tmp_path)
    record.line_of = lines.Lines(record).of
    until_light(record, clock)

    def all_reduce() -> int:
        return record.mark(at.COLLECTIVE)  # as probe_collectives does, called by the user's code

    def marked_backward() -> tuple[int, bool]:
        return all_reduce(), is_within(sys._getframe(), at.BACKWARD)

    stands_for(at.BACKWARD, marked_backward)
    clock.ns += 4 * MS
    before, is_inside = marked_backward()
    assert before & 0xFF == at.BACKWARD and is_inside and not is_within(sys._getframe(), at.BACKWARD)
    assert record.name_of(before >> 8).endswith(
        "test_collective_when_marks_were_light_then_what_it_lies_in_is_found_on_the_stack"
    )
    assert page.read().phase == Phase.COLLECTIVE
    page.close()


def test_step_without_clocks_when_it_does_not_end_then_the_tick_thread_finds_phase_and_line(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, page = ticked(tmp_path, clock, monkeypatch)
    until_light(record, clock)

    def marked_forward() -> None:
        seen = on_another_thread(ticking._look_at_light, (-1, 0, 0))
        assert record.light.is_on and page.read().is_light
        assert (
            record.words[at.W_SEEN] & 0xFF == at.FORWARD
        )  # where a process was last that is killed or stopped now
        clock.ns += 100 * MS
        on_another_thread(ticking._look_at_light, seen)

    stands_for(at.FORWARD, marked_forward)
    stood = clock.ns
    marked_forward()
    found = page.read()
    assert not record.light.is_on and found.phase == Phase.FORWARD
    assert found.line.startswith(f"{__file__}:") and "finds_phase_and_line" in found.line
    assert found.phase_since_ns == stood  # when this step was seen first
    end_step(record, clock)
    assert record.is_looked and record.is_timed  # steps may be slow from now on
    page.close()


def test_phase_when_what_is_marked_is_decorated_then_not_that_of_all_the_decorator_is_put_around() -> None:
    def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any) -> Any:
            return function(*args)

        return wrapper

    @decorated
    def backward() -> int:
        return phase_on(sys._getframe())[0]

    @decorated
    def validate() -> int:
        return phase_on(sys._getframe())[0]

    def marked_backward() -> int:
        return backward()

    stands_for(at.BACKWARD, marked_backward, backward)
    assert (marked_backward(), backward(), validate()) == (at.BACKWARD, at.BACKWARD, at.PYTHON)


def ticked(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> tuple[Writer, PageReader]:
    """A writer that is the one of this process."""
    record, page = opened(tmp_path)
    monkeypatch.setattr(process, "WRITER", record)
    monkeypatch.setattr(process, "LINES", lines.Lines(record))
    record.line_of = process.LINES.of
    monkeypatch.setattr(ticking, "monotonic_ns", clock)
    return record, page


def test_steps_without_clocks_when_they_become_slower_then_none_looks_like_a_long_phase(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, page = ticked(tmp_path, clock, monkeypatch)
    until_light(record, clock)
    record.next_looked = record.next_timed = 10_000  # nothing else ends them
    seen, began = (-1, 0, 0), clock.ns
    for _ in range(40):
        train(record, clock, 2, {at.FORWARD: 45.0})
        if record.light.is_on:  # as the thread does
            seen = ticking._look_at_light(seen)
        assert clock.ns - page.read().phase_since_ns <= STALE_NS
    known = [timed for timed in page.read().timed if timed.end_ns - timed.start_ns > 40 * MS]
    assert known and known[0].start_ns - began < 2 * STALE_NS  # how long they take by now is known soon
    page.close()


def on_another_thread(look: Callable[..., Any], *args: Any) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(look(*args)))
    thread.start()
    thread.join()
    return found[0]


def test_many_lines_when_seen_then_the_names_of_other_things_stay(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, page = ticked(tmp_path, clock, monkeypatch)
    name = record.string("all_reduce")
    until_light(record, clock)
    for number in range(500):
        body = f"def line_{number}(look):\n    look((-1, 0, 0))\n"
        names: dict[str, Any] = {}
        exec(compile(body, f"/home/user/project/part_{number}.py", "exec"), names)
        names[f"line_{number}"](ticking._look_at_light)
        seen = page.read()
        assert (seen.seen_phase, seen.seen_line.partition(" ")[2]) == (Phase.PYTHON, f"line_{number}")
    assert record.name_of(name) == "all_reduce"
    page.close()


def test_steps_without_clocks_then_it_is_known_of_which_step_the_last_end_is(
    tmp_path: Path, clock: Clock
) -> None:
    record, page = opened(tmp_path)
    until_light_again(record, clock)
    known = record.step
    record.next_looked = record.next_timed = known + 100
    train(record, clock, 45)
    found = page.read()
    assert (found.step, found.step_ended) == (known + 45, known)
    record.end_light(clock.ns)
    assert page.read().step_ended == known + 45
    page.close()
