"""What does a process say once, of its data, its replicas, its files, so that others can compare it? One line of JSON each.

`<pid>.notes.jsonl` beside the page, written rarely (a new loader, a new epoch, a checkpoint), read by the watcher when it has grown.
A loader worker writes into the file of its rank: its own files go when it ends. No torch here.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from typing import Any

from allranks.record import layout as at
from allranks.record import process

MAX_OF_KIND = 40
"""A job of many epochs says no more than this of each kind."""

_counts: Counter[str] = Counter()


def note(kind: str, **values: Any) -> None:
    """Add one line; never raises."""
    _write(process.side_path(at.NOTES_SUFFIX), kind, values)


def note_for_rank(kind: str, **values: Any) -> None:
    """As `note`, of a loader worker, into the file of the process that started it."""
    own = process.side_path(at.NOTES_SUFFIX)
    try:
        import multiprocessing

        parent = multiprocessing.parent_process()
    except ImportError:
        return
    if own is not None and parent is not None:
        _write(os.path.join(os.path.dirname(own), f"{parent.pid}{at.NOTES_SUFFIX}"), kind, values)  # noqa: PTH118, PTH120


def has_room(kind: str) -> bool:
    """Whether one more of this kind would be written."""
    return _counts[kind] < MAX_OF_KIND


def _write(path: str | None, kind: str, values: dict[str, Any]) -> None:
    if path is None or not has_room(kind):
        return
    _counts[kind] += 1
    try:
        line = json.dumps({"kind": kind, **values}) + "\n"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, line.encode())  # one write: lines of several processes are never mixed
        finally:
            os.close(descriptor)
    except (OSError, TypeError, ValueError):
        return  # a full /dev/shm, or a value that is no plain one: the note is left out


def read_notes(page_path: str) -> tuple[dict[str, Any], ...]:
    """All notes of a process, oldest first; none if it has written none."""
    path = page_path.removesuffix(at.SUFFIX) + at.NOTES_SUFFIX
    try:
        with open(path, encoding="utf-8", errors="replace") as file:  # noqa: PTH123 - a path in text
            lines = file.read().splitlines()
    except OSError:
        return ()
    found = []
    for line in lines:
        try:
            value = json.loads(line)
        except json.JSONDecodeError:
            continue  # just being written
        if isinstance(value, dict) and "kind" in value:
            found.append(value)
    return tuple(found)


def size_of_notes(page_path: str) -> int:
    """How many bytes of notes there are: grows with each."""
    try:
        return os.stat(page_path.removesuffix(at.SUFFIX) + at.NOTES_SUFFIX).st_size  # noqa: PTH116 - ten times a second
    except OSError:
        return 0


process.AFTER_FORK.append(_counts.clear)
