"""At which line of the user's does a slow rank stand, while it does what it spends more time on than the others?

A rank that looks slow is asked to note its lines (record/sampled.py); they are there when it is named, and nobody has waited for a stack.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from allranks.record import page, sampled
from allranks.watch.evidence import Rank, Slow
from allranks.watch.reading import place_of
from allranks.watch.slowness import WINDOW_S
from allranks.watch.verdict import Place

EVERY_S = 0.4
FOR_S = 3.0
"""So long a rank notes its lines after it was asked, and so long it is waited for enough of them."""
ENOUGH = 4
"""Lines, of the phase in which the rank is slow."""

SeenAt = tuple[str, Place, int]
"""Phase, line, and how often."""


def seen_at(rank: Rank | None, record_dir: Path | None) -> list[SeenAt]:
    """Where the rank was seen since it was asked; asks it to go on."""
    if rank is None or record_dir is None:
        return []
    path = record_dir / f"{rank.pid}.page"
    try:
        found = Counter(
            sampled.read(path)
        )  # first: what is no page, or of another version, is not written to
        sampled.ask(path, FOR_S)
    except (OSError, page.NotARecord):
        return []
    named = [(phase.name.lower(), place_of(line), times) for (phase, line), times in found.items()]
    return [(phase, place, times) for phase, place, times in named if place is not None]


class Lines:
    """Where the ranks that look slow were seen, and when to ask and to say so; on the hub, of all nodes."""

    def __init__(self) -> None:
        self._found: dict[int, Sequence[SeenAt]] = {}
        self._suspect: int | None = None
        self._since = self._asked_at = self._said_at = -math.inf

    def is_due(self, suspect: int, now: float) -> bool:
        """Whether to ask for the lines of this rank now."""
        if suspect != self._suspect:
            self._suspect, self._since, self._asked_at = suspect, now, -math.inf
            self._found.pop(suspect, None)
        if now - self._asked_at < EVERY_S:
            return False
        self._asked_at = now
        return True

    def found(self, rank: int, seen: Sequence[SeenAt]) -> None:
        """What its page has by now."""
        self._found[rank] = seen

    def is_enough(self, slow: Slow, now: float) -> bool:
        """Whether to take evidence and say it now; not again within a window, if the evidence speaks against it."""
        times = sum(times for _, times in self._of(slow))
        if (times < ENOUGH and now - self._since < FOR_S) or now - self._said_at < WINDOW_S:
            return False
        self._said_at = now
        return True

    def with_places(self, slow: Slow) -> Slow:
        """The slow rank, with the line at which it was seen most, and a second one at which it was nearly as often."""
        seen = sorted(self._of(slow), key=lambda one: -one[1])[:2]
        return replace(slow, places=tuple(place for place, times in seen if times >= 0.4 * seen[0][1]))

    def _of(self, slow: Slow) -> list[tuple[Place, int]]:
        # A forward without gradients counts as evaluation, whatever the script calls it; its mark is that of a forward.
        phases = ("evaluate", "forward") if slow.phase == "evaluate" else (slow.phase,)
        return [(place, times) for phase, place, times in self._found.get(slow.rank, ()) if phase in phases]
