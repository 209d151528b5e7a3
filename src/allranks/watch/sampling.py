"""At which line of the user's does a slow rank stand, while it does what it spends more time on than the others?

A rank that looks slow is asked to note its lines; by the time it is told of there are a dozen, and nobody has waited for one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from allranks.record import page, sampled
from allranks.watch.evidence import Rank, Slow
from allranks.watch.reading import place_of
from allranks.watch.verdict import Place

EVERY_S = 0.4
FOR_S = 3.0
"""So long a rank notes its lines after it was asked: until it is asked again, or is told of."""


def places(rank: Rank | None, record_dir: Path | None, phase: str) -> list[Place]:
    """The lines at which the rank was seen in `phase` ("" = any) since it was asked; asks it to go on. Takes well below a millisecond."""
    if rank is None or record_dir is None:
        return []
    path = record_dir / f"{rank.pid}.page"
    try:
        sampled.ask(path, FOR_S)
        found = sampled.read(path)
    except (OSError, page.NotARecord):
        return []
    lines = [place_of(line) for did, line in found if phase in ("", did.name.lower())]
    return [line for line in lines if line is not None]


def with_places(slow: Slow, seen: Sequence[Place]) -> Slow:
    """The slow rank, with the line at which it was seen most, and a second one at which it was nearly as often."""
    counted = Counter(seen).most_common(2)
    return replace(slow, places=tuple(p for p, n in counted if n >= 0.4 * counted[0][1]))
