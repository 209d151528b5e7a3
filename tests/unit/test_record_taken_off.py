"""Is a mark that counts nothing off while marks are light, back when they end, and is a call found over that then was marked by nobody?"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from allranks.record import layout as at
from allranks.record import process, ticking
from allranks.record.light import stands_for
from allranks.record.writer import Writer


def plain() -> str:
    return "plain"


def marked() -> str:
    return "marked"


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Writer]:
    made = Writer()
    made.open(str(tmp_path))
    made.mark(at.PYTHON)
    monkeypatch.setattr(process, "WRITER", made)
    yield made
    made.close()


@pytest.fixture
def places(record: Writer) -> dict[str, Any]:
    """As the module whose function is marked."""
    found = {"backward": marked}
    record.light.takes_off(at.BACKWARD, found, "backward", plain)
    return found


def begin_light(record: Writer) -> None:
    record.words[at.W_LIGHT] = 1
    record.light.turn_on()


def test_mark_when_marks_are_light_then_it_is_off_until_they_end(
    record: Writer, places: dict[str, Any]
) -> None:
    begin_light(record)
    assert places["backward"] is plain
    record.end_light(10)
    assert places["backward"] is marked and not record.light.is_on and not record.light.left


def test_mark_when_another_page_begins_then_it_is_on(
    record: Writer, places: dict[str, Any], tmp_path: Path
) -> None:
    begin_light(record)
    record.open(str(tmp_path))  # as in a forked child
    assert places["backward"] is marked


def test_mark_when_somebody_has_put_his_own_around_it_then_that_stays(
    record: Writer, places: dict[str, Any]
) -> None:
    def theirs() -> str:
        return places["before"]()

    places["before"], places["backward"] = marked, theirs
    begin_light(record)
    assert places["backward"] is theirs
    record.end_light(10)
    assert places["backward"] is theirs
    places["backward"] = marked
    begin_light(record)
    places["backward"] = (
        theirs  # around what was there: in light steps they call ours no longer, and lose nothing by it
    )
    record.end_light(10)
    assert places["backward"] is theirs


def standing_in_backward(record: Writer, then: Callable[[], None]) -> None:
    """Light marks are ended, as the tick thread does it, while a call stands that nobody marks; `then` runs when it has come back."""
    stands, goes_on = threading.Event(), threading.Event()

    def backward() -> None:
        stands.set()
        goes_on.wait(30.0)

    def trains() -> None:
        record.owner = threading.get_ident()
        backward()
        then()

    stands_for(at.BACKWARD, backward)
    thread = threading.Thread(target=trains)
    thread.start()
    assert stands.wait(30.0)
    begin_light(record)
    record.end_light(record.words[at.W_SINCE_NS] + 10, sys._current_frames()[record.owner])
    assert record.words[at.W_PHASE] & 0xFF == record.light.left == at.BACKWARD
    ticking._end_left(record.light.left)
    assert record.words[at.W_PHASE] & 0xFF == at.BACKWARD  # it still stands there
    goes_on.set()
    thread.join(30.0)


@pytest.mark.usefixtures("places")
def test_call_when_light_marks_end_in_it_then_it_lasts_until_it_is_seen_to_be_over(record: Writer) -> None:
    seen: list[tuple[int, int]] = []

    def look() -> None:
        since = record.words[at.W_SINCE_NS]
        ticking._end_left(record.light.left)
        seen.append((record.words[at.W_PHASE] & 0xFF, record.spent_ns[at.BACKWARD]))
        assert record.words[at.W_SINCE_NS] > since

    standing_in_backward(record, look)
    ((phase, spent),) = seen
    assert phase == at.PYTHON and spent > 0 and not record.light.left


@pytest.mark.usefixtures("places")
def test_call_when_another_mark_came_after_it_then_that_stays(record: Writer) -> None:
    def look() -> None:
        record.mark(at.OPTIMIZER)
        ticking._end_left(record.light.left)

    standing_in_backward(record, look)
    assert record.words[at.W_PHASE] & 0xFF == at.OPTIMIZER


@pytest.mark.usefixtures("places")
def test_call_when_its_step_has_ended_then_nobody_looks_after_it(record: Writer) -> None:
    standing_in_backward(record, lambda: None)
    record.end_step()
    assert not record.light.left
