"""At which line of the user's does a slow rank stand, while it does what it spends more time on than the others?"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from allranks.record import page
from allranks.watch import gather
from allranks.watch.asking import NO_STACKS, Asker, Target, phase_answered
from allranks.watch.evidence import Rank, Slow
from allranks.watch.reading import with_code
from allranks.watch.stacks import main_stack, user_place
from allranks.watch.verdict import Place

MOST_TRIES = 12
"""For one rank in one phase, within AGAIN_S: a try may cost 0.1 s of a core."""
ENOUGH = 4
"""Lines that were seen."""
AGAIN_S = 60.0
WITHIN_S = 0.4
"""For one try."""


class Samples:
    """Lines at which ranks that looked slow were seen, by (rank, phase), and how often one was looked for."""

    def __init__(self) -> None:
        self._tries: Counter[tuple[int, str]] = Counter()
        self._places: defaultdict[tuple[int, str], list[Place]] = defaultdict(list)
        self._since = float("-inf")
        self.is_looking = False
        """Whether the last look was one of the tries: the next follows soon, as long as the rank looks slow."""

    def is_due(self, of: tuple[int, str], now: float) -> bool:
        """Whether to try once more; the try is counted, whether a line is found or not."""
        if now - self._since > AGAIN_S:
            self._tries.clear()
            self._places.clear()
            self._since = now
        self.is_looking = self._tries[of] < MOST_TRIES and len(self._places[of]) < ENOUGH
        self._tries[of] += self.is_looking
        return self.is_looking

    def add(self, of: tuple[int, str], found: Iterable[Place]) -> None:
        """A try has found these."""
        self._places[of] += found

    def most(self, of: tuple[int, str]) -> tuple[Place, ...]:
        """The line seen most, and a second one seen nearly as often."""
        counted = Counter(self._places[of]).most_common(2)
        return tuple(p for p, n in counted if n >= 0.4 * counted[0][1])


def places(rank: Rank | None, record_dir: Path | None, phase: str) -> list[Place]:
    """The line, if the rank was in `phase` ("" = any) when its stack was taken; else none.

    Of a stack from outside that is known where no mark was made meanwhile; an answer of its own says it.
    """
    if rank is None or (before := _mark(rank, record_dir, phase)) is None:
        return []
    target = Target(rank.pid, gather.page_of(record_dir, rank.pid))
    how, stacks = Asker(WITHIN_S).stacks([target]).get(rank.pid, NO_STACKS)
    main = main_stack(stacks)
    place = user_place(main.frames) if main else None
    if how == "itself" and target.page is not None and phase:
        is_of_phase = phase_answered(target.page) == phase
    else:
        is_of_phase = _mark(rank, record_dir, phase) == before
    return [place] if place is not None and is_of_phase else []


def _mark(rank: Rank, record_dir: Path | None, phase: str) -> int | None:
    """What changes with every mark; None if the rank does something else."""
    if record_dir is None or not phase:
        return 0
    try:
        with page.PageReader(record_dir / f"{rank.pid}.page") as reader:
            glance = reader.glance()
    except (OSError, page.NotARecord):
        return 0
    return glance.marks if glance.phase.name.lower() == phase else None


def with_places(slow: Slow, places: tuple[Place, ...]) -> Slow:
    """The slow rank, with where it was most often and the lines of code there."""
    return replace(slow, places=tuple(with_code(p) for p in places))
