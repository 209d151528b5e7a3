"""Which files does a process write and read with torch.save and torch.load? The phase, and one note for each path.

A path is noted once: that several ranks write one file is known when it turns out to be damaged.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from typing import Any

from allranks.record import compat, notes, process
from allranks.record import layout as at
from allranks.record.probe_training import during

MAX_PATHS = 40
_noted: set[tuple[str, str]] = set()


def mark_files(module: Any) -> None:
    """torch.save and torch.load: the phase while they run, and what they wrote or read."""
    for name, kind, place in (("save", "saved", 1), ("load", "loaded", 0)):
        original = getattr(module, name)
        setattr(module, name, during(at.CHECKPOINT, _noting(original, kind, place)))


def _noting(function: Callable[..., Any], kind: str, place: int) -> Callable[..., Any]:
    @functools.wraps(function)
    def noting(*args: Any, **kwargs: Any) -> Any:
        file = args[place] if len(args) > place else kwargs.get("f")
        if isinstance(file, (str, os.PathLike)):
            try:
                _note(kind, file)
            except Exception as error:  # noqa: BLE001 - a path of the user's own kind, a folder that is gone
                compat.step_aside(f"which files are {kind}", error)
        return function(*args, **kwargs)

    return noting


def _note(kind: str, file: str | os.PathLike[str]) -> None:
    path = os.path.abspath(os.fspath(file))  # noqa: PTH100 - also what does not exist yet
    key = kind, str(path)
    if key not in _noted and len(_noted) < MAX_PATHS:
        _noted.add(key)
        writer = process.WRITER
        when = {"step": writer.step, "issued": writer.issued, "unix_s": round(time.time(), 2)}
        notes.note(kind, path=str(path), line=writer.name_of(process.LINES.here(3) >> 8), **when)


process.AFTER_FORK.append(_noted.clear)
