"""Which errors did a rank meet with and go on, and what may keep one quiet? Read from its notes (record/thrown.py) and the source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from allranks.record import thrown
from allranks.watch import source
from allranks.watch.evidence import Rank
from allranks.watch.observed import Caught
from allranks.watch.reading import place_of, source_of, with_code
from allranks.watch.verdict import Place

_EVERY = ("Exception", "BaseException")
_NO_ERROR = (
    "KeyboardInterrupt",
    "SystemExit",
    "StopIteration",
    "GeneratorExit",
    "ImportError",
    "ModuleNotFoundError",
    "Empty",
)
"""An `except` for nothing but these is no sign of an error that was kept quiet."""


def with_errors(rank: Rank) -> Rank:
    """The rank with the errors that its record has noted, and with what stands around the last of them if it stands nowhere any more."""
    noted = rank.record.noted if rank.record is not None else ()
    met = max((i for i, n in enumerate(noted) if n.get("kind") == "meets"), default=-1)
    errors = [(n, i < met) for i, n in enumerate(noted) if n.get("kind") == thrown.KIND]
    if not errors:
        return rank
    last = [place for line in errors[-1][0].get("lines", ()) if (place := place_of(str(line))) is not None]
    handlers = rank.handlers or (() if any(s.frames for s in rank.stacks) else handlers_of(last))
    return replace(rank, caught=tuple(_caught(*error) for error in errors), handlers=handlers)


def _caught(note: Mapping[str, Any], has_met_again: bool) -> Caught:
    names = tuple(map(str, note.get("names", ())))
    places = [place for line in note.get("lines", ()) if (place := place_of(str(line))) is not None]
    return Caught(
        kinds=names,
        message=str(note.get("text", "")),
        what=str(note.get("what", "")),
        step=int(note.get("step", 0)),
        where=place_of(str(note.get("at") or "")) or next(iter(places), None),
        handler=next((h for p in places for h in _handlers(p, names)), None),
        has_met_again=has_met_again,
    )


def handlers_of(frames: Sequence[Place]) -> tuple[Place, ...]:
    """Those `except` around these lines that would take an ordinary error."""
    return tuple(dict.fromkeys(h for frame in frames for h in _handlers(frame, None)))


def _handlers(place: Place, names: Sequence[str] | None) -> list[Place]:
    """Around a line; `names` are those of the error's classes, None: of any."""
    found = []
    for one in source.handlers(source_of(place.file), place.line):
        fitting = [
            (line, goes_on)
            for line, taken, goes_on in one
            if not taken
            or (any(n not in _NO_ERROR for n in taken) if names is None else {*names, *_EVERY} & {*taken})
        ]
        # The first that fits takes an error, and may pass it on to the next `try`.
        lines = [line for line, goes_on in (fitting if names is None else fitting[:1]) if goes_on]
        found += [with_code(Place(place.file, line, place.function)) for line in lines]
    return found
