"""Which lines of a timeline are read? All of a short run; of a long one some looks, evenly over its time.

A file is in order of time: a head, then look after look, each with a sample of every rank and what steps and calls it found. A run of ten
hours has 40,000 looks, and its report shows some hundred. So a look is skipped by its time alone, unparsed, and the reader needs neither
the memory nor the time of the whole. Sums stay exact: samples are cumulative, and the first and the last of each rank are kept.
"""

from __future__ import annotations

import json
import mmap
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

MOST_LOOKS = 2000
"""Of a run that has more, so many are read; fewer with many ranks."""
MOST_ROWS = 16_000
"""Samples of all ranks together: some 50 MB of memory with their steps and calls."""
LEAST_LOOKS = 200
_HEAD, _TAIL = b'{"kind":"head"', 1 << 16
_TIME = re.compile(rb'"kind":\s*"sample",\s*"t":\s*([0-9.]+)')
_KIND = re.compile(rb'\{"kind":\s*"(\w+)"(?:,\s*"rank":\s*(\d+))?')
_FIRST_OF_ROW = re.compile(rb'"rows":\s*\[\[(\d+)')


@dataclass(frozen=True, slots=True)
class Stretch:
    """One attempt in the file of one node."""

    path: Path
    head: dict[str, Any]
    begin: int
    """Bytes: after the head."""
    end: int

    @property
    def attempt(self) -> int:
        return int(self.head.get("attempt", 0))


def stretches(path: Path) -> list[Stretch]:
    """The attempts that a file holds; only their heads are read."""
    if not path.stat().st_size:
        return []
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        starts = [at for pattern in (_HEAD, b'{"kind": "head"') for at in _heads(text, pattern)]
        size = len(text)
        found = []
        for at, after in zip(sorted(starts), [*sorted(starts)[1:], size], strict=True):
            line_end = text.find(b"\n", at, after)
            head = parsed(text[at : line_end if line_end >= 0 else after])
            if head is not None:
                found.append(Stretch(path, head, line_end + 1 if line_end >= 0 else after, after))
    return found


def _heads(text: mmap.mmap, pattern: bytes) -> Iterator[int]:
    at = text.find(pattern)
    while at >= 0:
        if at == 0 or text[at - 1 : at] == b"\n":
            yield at
        at = text.find(pattern, at + 1)


def parsed(line: bytes) -> dict[str, Any] | None:
    """The object of a line; None if it was cut short by a kill."""
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def lines_of(part: Stretch, wanted: Collection[int] = (), looks: int = 1) -> Iterator[dict[str, Any]]:
    """The lines of one attempt, thinned out if it is long; a step of `wanted` is among them whatever its time.

    Args:
        wanted: Steps.
        looks: So many looks in a row are read together: two nodes look at slightly different times.
    """
    ranks = max(1, int(part.head.get("world_size", 1) or 1))
    most = min(MOST_LOOKS, max(LEAST_LOOKS, MOST_ROWS // ranks)) // looks
    with part.path.open("rb") as file:
        begin, end = _times(file, part)
        file.seek(part.begin)
        yield from _chosen(file, part, _Slots(begin, (end - begin) / most, looks), wanted)


def _times(file: BinaryIO, part: Stretch) -> tuple[float, float]:
    """Of the first and of the last sample."""
    file.seek(part.begin)
    first = _TIME.search(file.read(min(_TAIL, part.end - part.begin)))
    file.seek(max(part.begin, part.end - 16 * _TAIL))
    last = _TIME.findall(file.read(part.end - file.tell()))
    return (float(first[1]) if first else 0.0), (float(last[-1]) if last else 0.0)


class _Slots:
    """Is a look at this time read?"""

    def __init__(self, begin: float, width_s: float, looks: int) -> None:
        self._begin, self._width_s, self._looks = begin, width_s, looks
        self._slot, self._in_slot = -1, 0

    def take(self, t: float) -> bool:
        slot = int((t - self._begin) / self._width_s) if self._width_s > 0 else 0
        if slot != self._slot:
            self._slot, self._in_slot = slot, 0
        self._in_slot += 1
        return self._in_slot <= self._looks or not self._is_long

    @property
    def _is_long(self) -> bool:
        """Looks are at least half a second apart: narrower slots hold one each."""
        return self._width_s > 0.4


def _chosen(
    file: BinaryIO, part: Stretch, slots: _Slots, wanted: Collection[int]
) -> Iterator[dict[str, Any]]:
    marks = [b"[%d," % step for step in wanted]
    skipped: dict[tuple[bytes, bytes], bytes] = {}  # the newest of each kind and rank: the last are kept
    left, is_taken, was_sample = part.end - part.begin, True, False
    for line in file:
        if left <= 0:
            break
        left -= len(line)
        found = _KIND.match(line)
        kind, rank = (found[1], found[2] or b"") if found else (b"", b"")
        if kind == b"sample":
            if not was_sample and (time := _TIME.search(line, 0, 64)):
                is_taken = slots.take(float(time[1]))
            row = _FIRST_OF_ROW.search(line)
            rank = row[1] if row else b""
        was_sample = kind == b"sample"
        if is_taken or kind == b"facts" or not kind:
            skipped.pop((kind, rank), None)
            if (value := parsed(line)) is not None:
                yield value
            continue
        skipped[kind, rank] = line
        if kind == b"steps" and marks and any(mark in line for mark in marks):
            value = parsed(line)
            if value is not None:
                yield {**value, "rows": [row for row in value["rows"] if row[0] in wanted]}
    for line in skipped.values():
        if (value := parsed(line)) is not None:
            yield value
