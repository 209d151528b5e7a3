"""Are handlers of signals noted as they run, given back as they were, and held no longer than by the user?"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from allranks.record import notes, signals


class Handler:
    """Of the user's."""

    def __call__(self, number: int, frame: FrameType | None) -> None: ...


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The numbers that are noted."""
    found: list[int] = []
    monkeypatch.setattr(notes, "_write", lambda path, kind, values: found.append(values["number"]))
    yield found
    signals._counts.clear()


@pytest.fixture
def module() -> Any:
    """Looks like `signal`, marked; `ring` runs what is installed."""
    installed: dict[int, Any] = {}

    def signal(number: int, handler: Any) -> Any:
        before, installed[number] = installed.get(number, 0), handler
        return before

    found = SimpleNamespace(signal=signal, getsignal=installed.get, default_int_handler=print)
    found.ring = lambda number: installed[number](number, None)
    signals.mark_signals(found)  # type: ignore[arg-type]
    return found


@pytest.mark.usefixtures("noted")
def test_handler_when_replaced_then_given_back_and_no_longer_held(module: Any) -> None:
    first, second = Handler(), Handler()
    assert module.signal(14, first) == 0
    assert module.getsignal(14) is first
    assert module.signal(14, second) is first
    watched = weakref.ref(first)
    del first
    gc.collect()
    assert watched() is None


def test_timer_when_it_rings_in_every_step_then_another_signal_is_still_noted(
    noted: list[int], module: Any
) -> None:
    for _ in range(2 * notes.MAX_OF_KIND):
        module.signal(14, Handler())
        module.ring(14)
    module.signal(15, Handler())
    module.ring(15)
    assert noted.count(14) < notes.MAX_OF_KIND
    assert noted[-1] == 15
