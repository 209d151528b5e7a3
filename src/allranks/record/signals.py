"""Which signals has this process handled, and at which step? A handler in Python leaves no other trace.

A flag set by a handler ends one rank's loop and not the others': that is only understood by who knows of the signal.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from allranks.record import layout as at
from allranks.record import notes, process

_ours: dict[Any, Any] = {}
"""Our handler: the user's."""


def mark_signals(module: ModuleType) -> None:
    """signal.signal and signal.getsignal: handlers of Python are noted as they run, and are given back as they were."""
    install, look_up = module.signal, module.getsignal

    def signal(signalnum: Any, handler: Any) -> Any:
        known = module.default_int_handler
        given = (
            _noting(handler)
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
    return _ours.get(handler, handler) if handler.__hash__ is not None else handler


def _noting(handler: Callable[..., Any]) -> Callable[..., Any]:
    def noted(signum: int, frame: Any) -> Any:
        words = process.WRITER.words
        notes.note("signal", number=int(signum), step=words[at.W_STEP], batch=words[at.LOADER + at.L_DRAWN])
        return handler(signum, frame)

    _ours[noted] = handler
    return noted
