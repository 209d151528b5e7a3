"""Which errors came out of what is marked (a batch, a forward, a backward, a collective)? The script may catch them and go on.

Noted as they pass, with the lines of the user's that they come to next. Whether the script did go on is for the reader to see
(watch/caught.py). It costs nothing where nothing is raised. No torch here.
"""

from __future__ import annotations

from sys import _getframe
from typing import Any

from allranks.record import notes, process
from allranks.record.lines import USER, describe, kind_of, line_of_traceback

KIND, BATCH = "error", "the next batch"
MAX_LINES, MAX_TEXT = 6, 200
_last: tuple[Any, ...] = ()


def note(error: BaseException, what: str) -> None:
    """Once for each error, however many marks it passes; never raises.

    Args:
        what: What was marked, in words.
    """
    global _last
    if not isinstance(error, Exception) or not notes.has_room(KIND):  # Ctrl-C, an exit
        return
    try:
        step = process.WRITER.step
        text = _text(str(error).strip())
        this = id(error), type(error), step, text
        if this == _last:
            return
        _last = this
        names = [c.__name__ for c in type(error).__mro__ if c not in (BaseException, object)]
        notes.note(
            KIND, names=names, text=text, what=what, step=step,
            at=line_of_traceback(error.__traceback__), lines=_lines(),
        )  # fmt: skip
    except Exception:  # noqa: BLE001 - an error that cannot be shown: the user's own goes on
        return


def _text(message: str) -> str:
    """The first line; of what a loader worker raised the last one, since the others are its traceback."""
    lines = message.splitlines() or [""]
    return lines[-1 if lines[0].startswith("Caught ") else 0][:MAX_TEXT]


def _lines() -> list[str]:
    """The user's lines on the stack, innermost first."""
    frame, found = _getframe(2), []
    while frame is not None and len(found) < MAX_LINES:
        if kind_of(frame.f_code.co_filename) == USER:
            found.append(describe(frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return found


def _after_fork() -> None:
    global _last
    _last = ()


process.AFTER_FORK.append(_after_fork)
