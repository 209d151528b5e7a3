"""Which rank is slower than the others?

Waiting is not blamed on its victim: a rank that works long makes every other rank's backward long. So of the backward only the time
until the last gradient counts as a rank's own (nothing, where that is not known), and the others must wait for about as much.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from allranks.watch.evidence import Slow
from allranks.watch.rows import WORK_PHASES, Row

WINDOW_S = 4.0
LOOK_EVERY_S = 0.25
"""The watcher may come ten times a second, and three comparisons take it longer than all else of a look."""
MIN_STEPS = 5
MIN_SHARE = 0.15
"""Of the step time that the slow rank adds; less is not worth a word."""
MIN_EXCESS_S = 0.002


@dataclass
class Slowness:
    """Compares the ranks' own work over a sliding window and its halves."""

    _seen: deque[tuple[float, dict[int, Row]]] = field(default_factory=deque)
    _suspect: int | None = None
    _since: float = 0.0

    def look(self, rows: Mapping[int, Row], now: float) -> Slow | None:
        """The straggler of the last window, once it is the same for a whole window."""
        if len(rows) < 2 or any(r.is_over or r.step < 3 for r in rows.values()):
            self._seen.clear()
            self._suspect = None
            return None
        if self._seen and now - self._seen[-1][0] < LOOK_EVERY_S:
            return None
        self._seen.append((now, dict(rows)))
        while self._seen and now - self._seen[0][0] > WINDOW_S:
            self._seen.popleft()
        if now - self._seen[0][0] < WINDOW_S - 0.6:
            return None
        then, before = self._seen[0]
        middle_at, middle = self._seen[len(self._seen) // 2]
        found = compare(before, rows, now - then)
        # In both halves: one long checkpoint or evaluation does not make a straggler.
        halves = compare(before, middle, middle_at - then), compare(middle, rows, now - middle_at)
        if found is not None and any(h is None or h.rank != found.rank for h in halves):
            found = None
        if found is None or found.rank != self._suspect:
            self._suspect, self._since = (found.rank if found else None), now
            return None
        if now - self._since < 1.0:
            return None
        return found

    def suspect(self) -> int | None:
        """Who looks slow at the moment: it is asked for its lines."""
        return self._suspect


def compare(before: Mapping[int, Row], after: Mapping[int, Row], span_s: float) -> Slow | None:
    """The rank whose own work per step is larger than the others' by what they wait for it."""
    if set(before) != set(after):
        return None
    steps = min(after[n].step - before[n].step for n in after)
    if steps < MIN_STEPS:
        return None
    spent = {n: _spent(before[n], after[n], steps) for n in after}
    own = {n: sum(s.work.values()) for n, s in spent.items()}
    waits = {n: s.wait_s for n, s in spent.items()}
    slow = max(own, key=lambda n: own[n])
    rest = [n for n in own if n != slow]
    most = max(own[n] for n in rest)
    excess, step = own[slow] - most, span_s / steps
    less_wait = min(waits[n] for n in rest) - waits[slow]
    if excess < MIN_EXCESS_S or excess < MIN_SHARE * step or less_wait < 0.5 * excess:
        return None
    more = {p: spent[slow].work[p] - max(spent[n].work[p] for n in rest) for p in spent[slow].work}
    phase = max(more, key=lambda p: more[p])
    return Slow(slow, own[slow], most, excess, step, phase, span_s)


@dataclass(frozen=True, slots=True)
class _Spent:
    """Of one rank, a step."""

    work: dict[str, float]
    wait_s: float


def _spent(before: Row, after: Row, steps: int) -> _Spent:
    work = {p: after.phases_s[i] - before.phases_s[i] for i, p in enumerate(WORK_PHASES)}
    wait = after.wait_s - before.wait_s
    computed = 0.0
    if before.exchanged and after.exchanged:
        backward, buffers, exchanged, of = (
            b - a for a, b in zip(before.exchanged, after.exchanged, strict=True)
        )
        if of > 0:
            computed = max(0.0, backward * (1 - min(1.0, exchanged / of)))
            buffers = min(buffers, work["forward"])
            work["forward"] -= buffers
            wait += buffers
    work["backward"] = computed
    return _Spent({p: s / steps for p, s in work.items()}, (wait - computed) / steps)
