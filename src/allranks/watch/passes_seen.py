"""Which loader does a rank train from, and how many passes over it were there? By looks at its page, about one a second.

A page tells of the newest pass and the one before it. Where passes are shorter than a look is apart, those in between are taken for the
loaders that were seen, in the same proportion: a training loader and one for evaluation mostly take turns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from allranks.record import page


class PassesSeen:
    """The passes of one rank, by the line of their loop."""

    def __init__(self) -> None:
        self._passes: Counter[str] = Counter()
        self._length: dict[str, int] = {}
        self._last = 0
        self._newest: page.Loader | None = None
        self._trained: tuple[str, int] | None = None

    def look(self, record: page.Record) -> None:
        """What is new in the page."""
        for one in (record.loader_before, record.loader):
            if one is not None and one.number > self._last:
                self._passes[one.line] += 1
                self._length[one.line] = one.length
                self._last, self._newest = one.number, one

    def trains(self, note: Mapping[str, Any]) -> None:
        """A pass over a training loader was noted; the first one counts."""
        if self._trained is None and note.get("line"):
            self._trained = str(note["line"]), int(note.get("num_workers", 0))

    def facts(self) -> dict[str, Any]:
        """Of the training loader, or of the newest where none is known to train; empty without a loader."""
        if self._newest is None:
            return {}
        line, workers = self._trained or (self._newest.line, self._newest.num_workers)
        seen = sum(self._passes.values())
        batches = {at: count * max(1, self._length[at]) for at, count in self._passes.items()}
        # A pass over an iterable is of any length: nothing is known of its share then.
        is_known = len(batches) < 2 or all(length >= 0 for length in self._length.values())
        share = batches.get(line, 0) / sum(batches.values()) if is_known else 1.0
        return {
            "loader_workers": workers,
            "loader_line": line,
            "loader_length": self._length.get(line, -1),
            "loader_passes": round(self._last * self._passes[line] / seen),
            "loader_share": round(share, 3),
        }
