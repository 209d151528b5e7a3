"""What have the ranks noted of their data, replicas and files, and is it worth a look? Compared between ranks by causes/.

A look is taken when notes have grown and were then left alone for a moment, so that what one rank says is there beside what the
others say. It reads files only: no rank is stopped, signalled or asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from allranks.watch.case import Case
from allranks.watch.evidence import Rank
from allranks.watch.reading import place_of
from allranks.watch.rows import Row
from allranks.watch.verdict import Confidence, Place, Verdict

SETTLE_S = 0.25
"""Notes of one event come from all ranks within about so long of each other."""
MAX_WAIT_S = 1.5
"""But where they grow all the time, a look is taken at least so often."""

Note = Mapping[str, Any]


@dataclass
class Noted:
    """Remembers how much was looked at."""

    _looked_at: tuple[int, ...] = ()
    _newest: tuple[int, ...] = ()
    _since: float = 0.0
    _first: float = 0.0

    @property
    def is_waiting(self) -> bool:
        """Whether notes have grown that will be looked at in a moment."""
        return self._newest != self._looked_at

    def look(self, rows: Mapping[int, Row], now: float) -> tuple[int, ...]:
        """The ranks to look at, or none."""
        sizes = tuple(rows[n].notes for n in sorted(rows))
        if sizes == self._looked_at or not any(sizes):
            return ()
        if sizes != self._newest:
            if self._newest == self._looked_at:
                self._first = now
            self._newest, self._since = sizes, now
        if now - self._since < SETTLE_S and now - self._first < MAX_WAIT_S:
            return ()
        self._looked_at = self._newest = sizes
        return tuple(sorted(rows))


def notes(rank: Rank, kind: str) -> list[Note]:
    """What this rank noted of this kind, oldest first."""
    return [n for n in rank.record.noted if n.get("kind") == kind] if rank.record else []


def by_rank(case: Case, kind: str) -> dict[int, list[Note]]:
    """The same of all ranks that noted something."""
    return {r.rank: found for r in case.evidence.ranks if (found := notes(r, kind))}


def first_of_each(case: Case, kind: str) -> tuple[Note, list[int]] | None:
    """The first rank's first note, and the ranks that noted such a thing; None if no rank did."""
    found = by_rank(case, kind)
    ranks = sorted(found)
    return (found[ranks[0]][0], ranks) if ranks else None


def on_all(case: Case, kind: str, *keys: str) -> Iterator[tuple[tuple[Any, ...], dict[int, Note]]]:
    """Notes that every rank of the job has, matched by the values of `keys`: (values, rank -> the first of them)."""
    found = by_rank(case, kind)
    if len(found) < case.evidence.world_size or case.evidence.world_size < 2:
        return
    matched = {
        rank: {tuple(str(n.get(k)) for k in keys): n for n in reversed(own)} for rank, own in found.items()
    }
    first = next(iter(matched.values()))
    for key in reversed(first):
        if all(key in own for own in matched.values()):
            yield key, {rank: own[key] for rank, own in sorted(matched.items())}


def place(note: Note, key: str = "line") -> Place | None:
    """A line that was noted, with its text."""
    return place_of(str(note.get(key) or ""))


def say(
    case: Case,
    code: str,
    name: str,
    what: str,
    ranks: Sequence[int],
    *,
    where: Sequence[Place | str | None] = (),
    facts: Sequence[str] = (),
    fix: str = "",
    others: str = "",
    step: int | None = None,
    confidence: Confidence = "certain",
) -> Verdict:
    """A verdict on something that is wrong while the job goes on: no 'since', no waiting."""
    known = [r for n in ranks if (r := case.evidence.rank(n)) is not None]
    lines = [w if isinstance(w, str) else case.at(w) for w in where if w]
    verdict = case.verdict(
        code,
        name,
        what,
        known,
        where=tuple(dict.fromkeys(lines)),
        facts=facts,
        fix=fix,
        others=others,
        confidence=confidence,
    )
    return replace(verdict, since_s=None, step=step)


def who(case: Case, ranks: Sequence[int]) -> str:
    """'rank 1 on gpu-a'."""
    return case.who([r for n in ranks if (r := case.evidence.rank(n)) is not None])
