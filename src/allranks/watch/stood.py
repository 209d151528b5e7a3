"""Has a rank stood at the same lines since an earlier look? Two looks half a second apart tell more than two within one.

What computes on is either at work that changes or in a loop; and a look is over too soon to see slow work change.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from allranks.watch.evidence import Rank
from allranks.watch.stacks import main_stack

Lines = tuple[tuple[str, int, str], ...]


@dataclass
class Stood:
    """Remembers where the ranks of this node were at the looks before."""

    _seen: dict[int, tuple[Lines, float]] = field(default_factory=dict)

    def mark(self, ranks: Iterable[Rank], now: float) -> tuple[Rank, ...]:
        """The ranks of a look that ended at `now`, a monotonic time, with stood_s."""
        return tuple(self._mark(r, now) for r in ranks)

    def _mark(self, rank: Rank, now: float) -> Rank:
        lines = _lines(rank)
        before, since = self._seen.get(rank.pid, ((), now))
        phase_s = rank.record.phase_s if rank.record is not None else 0.0
        if not lines or lines != before or now - since > phase_s:
            since = now
        self._seen[rank.pid] = lines, since
        return replace(rank, stood_s=round(now - since, 2))


def _lines(rank: Rank) -> Lines:
    """Where its main thread is; nothing where that changes all the while."""
    main = main_stack(rank.stacks)
    if main is None or rank.is_moving:
        return ()
    return tuple((f.file, f.line, f.function) for f in main.frames)
