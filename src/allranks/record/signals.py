"""Which signals has this process handled, and at which step? A handler in Python leaves no other trace.

A flag set by a handler ends one rank's loop and not the others': that is only understood by who knows of the signal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import ModuleType
from typing import Any

from allranks.record import layout as at
from allranks.record import notes, process

MAX_OF_NUMBER = 8
"""A timer that rings in every step must leave room for the signal that ends the loop."""
_counts: Counter[int] = Counter()


class _Noting:
    """What is installed for a handler of the user's."""

    __slots__ = ("handler",)

    def __init__(self, handler: Callable[..., Any]) -> None:
        self.handler = handler

    def __call__(self, signum: int, frame: Any) -> Any:
        _note(int(signum))
        return self.handler(signum, frame)


def mark_signals(module: ModuleType) -> None:
    """signal.signal and signal.getsignal: handlers of Python are noted as they run, and are given back as they were."""
    install, look_up = module.signal, module.getsignal

    def signal(signalnum: Any, handler: Any) -> Any:
        known = module.default_int_handler
        given = (
            _Noting(handler)
            if callable(handler) and handler is not known and not _is_constant(handler)
            else handler
        )
        return _user(install(signalnum, given))

    def getsignal(signalnum: Any) -> Any:
        return _user(look_up(signalnum))

    for function, original in ((signal, install), (getsignal, look_up)):
        function.__doc__, function.__module__ = original.__doc__, original.__module__
        setattr(module, function.__name__, function)


def _is_constant(handler: Any) -> bool:
    return isinstance(
        handler, int
    )  # SIG_DFL and SIG_IGN can be called as little as other numbers, but are enums


def _user(handler: Any) -> Any:
    return handler.handler if type(handler) is _Noting else handler


def _note(number: int) -> None:
    if _counts[number] < MAX_OF_NUMBER:
        _counts[number] += 1
        words = process.WRITER.words
        notes.note("signal", number=number, step=words[at.W_STEP], batch=process.WRITER.light.drawn)


process.AFTER_FORK.append(_counts.clear)
