"""When is it worth looking closer?

A pure function of the newest rows of all ranks and of what was seen before. Silence alone is no reason: in evaluation, a
checkpoint, a compilation or the first batch all ranks are silent together. Asymmetry is: one waits inside communication
for another that is somewhere else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from allranks.watch import apart
from allranks.watch.noted import Noted
from allranks.watch.numbers import Numbers
from allranks.watch.rows import Row

MIN_WAIT_S = 1.0
STEPS = 10
"""A wait of so many median steps, and of MIN_WAIT_S, is worth a look."""
MISMATCH_S = 0.3
STOPPED_S = 0.09
"""At two looks."""
DYING_S = 0.2
"""After an exception its traceback is printed; then it can be read."""
DYING_AGAIN_S = 0.7
LEAVING_S = 1.5
SAME_CALL_S = 3.0
"""All ranks in the same collective for so long: the network, perhaps."""
SILENCE_S = 10.0
ASLEEP_S, ASLEEP_AGAIN_S = 1.5, 20.0
"""All sleep for so long: they may wait for a file; looked at so often."""
SECOND_LOOK_S = 0.5
"""After the first look at a wait: has the rank that does not come stood where it stood?"""
_COMMUNICATING = ("forward", "backward", "build", "init")


@dataclass(frozen=True, slots=True)
class Suspicion:
    """A reason to take evidence."""

    kind: str
    """'stopped', 'waiting', 'mismatch', 'network', 'silence', 'numbers', 'notes'."""
    ranks: tuple[int, ...] = ()
    """Who waits, or who is stopped."""
    age_s: float = 0.0


@dataclass
class Trigger:
    """Remembers what was looked at, so that nothing is looked at again for no new reason."""

    _looked_at_s: float = 0.0
    """Age of the wait at the last look of this episode."""
    _episode: tuple[object, ...] = ()
    _dying_since: dict[int, float] = field(default_factory=dict)
    _dying_looked: tuple[object, ...] = ()
    _stopped_looked: tuple[int, ...] = ()
    _stopped_since: dict[int, float] = field(default_factory=dict)
    _reported_differences: set[tuple[object, ...]] = field(default_factory=set)
    _silent_since: float | None = None
    _silent_marks: tuple[int, ...] = ()
    _silent_looks: int = 0
    _asleep_looked_at: float = float("-inf")
    _has_looked_again: bool = False
    _numbers: Numbers = field(default_factory=Numbers)
    _noted: Noted = field(default_factory=Noted)

    def look(self, rows: Mapping[int, Row], now: float) -> Suspicion | None:
        """The most pressing suspicion, or None. `now` is a monotonic time; call it ten times a second while a rank stands, else twice."""
        if any(r.is_interrupted for r in rows.values()):
            return None
        live = {n: r for n, r in rows.items() if not (r.is_over and r.state in ("", "Z", "X"))}
        if (dying := self._dying(live, now)) is not None or self._dying_since:
            return dying
        for found in (
            self._stopped(live, now),
            self._difference(rows),
            self._waiting(rows, live),
            self._silence(live, now),
        ):
            if found is not None:
                return found
        if wrong := self._numbers.look(rows, now):
            return Suspicion("numbers", wrong)
        noted = self._noted.look(rows, now)
        return Suspicion("notes", noted) if noted else None

    @property
    def is_waiting(self) -> bool:
        """Whether the next look is to come soon, however well all ranks move."""
        return self._numbers.is_waiting or self._noted.is_waiting

    def last(self, rows: Mapping[int, Row]) -> str:
        """All ranks have ended well: the one look that is left, "numbers" or "notes"."""
        return "numbers" if self._numbers.last(rows) else "notes"

    def _dying(self, rows: Mapping[int, Row], now: float) -> Suspicion | None:
        """An exception is on its way out: it explains whatever else there is; after 5 s it does not any more."""
        dying = {n for n, r in rows.items() if r.is_dying}
        self._dying_since = {
            n: self._dying_since.get(n, now) for n in dying if now - self._dying_since.get(n, now) < 5.0
        }
        ripe = tuple(sorted(n for n, since in self._dying_since.items() if now - since >= DYING_S))
        again = any(now - since >= DYING_AGAIN_S for since in self._dying_since.values())
        if not ripe or (ripe, again) == self._dying_looked:
            return None
        self._dying_looked = (ripe, again)
        return Suspicion("dying", ripe)

    def _stopped(self, rows: Mapping[int, Row], now: float) -> Suspicion | None:
        now_stopped = {n for n, r in rows.items() if r.state in ("T", "t")}
        self._stopped_since = {n: self._stopped_since.get(n, now) for n in now_stopped}
        long = tuple(sorted(n for n, since in self._stopped_since.items() if now - since >= STOPPED_S))
        if not long:
            self._stopped_looked = ()
            return None
        age = max(now - self._stopped_since[n] for n in long)
        if long == self._stopped_looked:
            return None
        self._stopped_looked = long
        return Suspicion("stopped", long, age)

    def _difference(self, rows: Mapping[int, Row]) -> Suspicion | None:
        """The same number in the same group with another call: at once, whether anybody waits or not."""
        seen: dict[tuple[object, ...], set[int]] = {}
        for row in rows.values():
            for group, number, value in row.tail:
                seen.setdefault((group, number), set()).add(value)
        found = {k for k, values in seen.items() if len(values) > 1} | apart.signs(rows)
        new = found - self._reported_differences
        self._reported_differences |= new
        return Suspicion("mismatch", tuple(sorted(rows))) if new else None

    def _waiting(self, rows: Mapping[int, Row], live: Mapping[int, Row]) -> Suspicion | None:
        if any(r.is_leaving and r.phase_s < LEAVING_S for r in live.values()):
            return None  # its end is heard of in a moment, and says more
        waiting = {n: r for n, r in live.items() if wait_s(r) > limit_s(r)}
        if not waiting or (len(rows) < 2 and not all(r.phase == "init" for r in live.values())):
            self._episode, self._looked_at_s = (), 0.0
            return None
        age = max(wait_s(r) for r in waiting.values())
        standing = {n: _standing(r) for n, r in rows.items()}
        if len(set(standing.values())) == 1 and all(wait_s(r) > 0 for r in live.values()):
            # All in the same: compiling, a big transfer, or a dead network; only the last shows in the sockets.
            kinds = ("backward", "build", "init")
            if age < SAME_CALL_S or not all(r.op or r.phase in kinds for r in live.values()):
                return None
            return self._again(
                ("network", *_moves(waiting)), Suspicion("network", tuple(sorted(waiting)), age)
            )
        return self._again(("waiting", *_moves(waiting)), Suspicion("waiting", tuple(sorted(waiting)), age))

    def _silence(self, rows: Mapping[int, Row], now: float) -> Suspicion | None:
        """Nobody moves for long: a look that only speaks if it finds something definite."""
        marks = tuple(rows[n].marks for n in sorted(rows))
        if marks != self._silent_marks or self._silent_since is None:
            self._silent_marks, self._silent_since, self._silent_looks = marks, now, 0
            return None
        age = now - self._silent_since
        is_asleep = bool(rows) and all(r.is_asleep for r in rows.values())
        if is_asleep and age >= ASLEEP_S and now - self._asleep_looked_at >= ASLEEP_AGAIN_S:
            self._asleep_looked_at = now
            return Suspicion("silence", tuple(sorted(rows)), age)
        if not rows or age < SILENCE_S * 3**self._silent_looks:
            return None
        self._silent_looks += 1
        return Suspicion("silence", tuple(sorted(rows)), age)

    def _again(self, key: tuple[object, ...], found: Suspicion) -> Suspicion | None:
        """At once for a new episode, and again a moment later; then whenever the wait has grown by more than half."""
        is_same = key == self._episode
        is_second = found.kind == "waiting" and not self._has_looked_again
        more_s = SECOND_LOOK_S if is_second else 0.5 * self._looked_at_s + 0.3
        if is_same and found.age_s < self._looked_at_s + more_s:
            return None
        self._has_looked_again = is_same
        self._episode, self._looked_at_s = key, found.age_s
        return found


def wait_s(row: Row) -> float:
    """How long the rank has been inside communication, or inside a phase in which DDP communicates."""
    if row.op:
        return row.call_s
    return row.phase_s if row.phase in _COMMUNICATING else 0.0


def limit_s(row: Row) -> float:
    """How long a wait is nothing to look at."""
    return max(MIN_WAIT_S, STEPS * row.median_step_s)


def _standing(row: Row) -> object:
    if row.op:
        return (row.group, row.call_seq, row.call_hash)
    return (row.phase, row.seq) if row.phase in _COMMUNICATING else ("alone", row.rank)


def _moves(rows: Mapping[int, Row]) -> tuple[object, ...]:
    """Changes when one of these ranks goes on."""
    return tuple((n, r.step, r.phase, r.op, r.call_seq) for n, r in sorted(rows.items()))
