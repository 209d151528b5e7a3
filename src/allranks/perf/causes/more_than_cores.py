"""Which ranks wait for a core while each runs more of something than the cores of its host can hold?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from allranks.perf.view import View, who

MIN_WAIT = 0.1


@dataclass(frozen=True, slots=True)
class TooMany:
    """Ranks that wait for a core, and what the one that waits most runs."""

    ranks: tuple[int, ...]
    count: int
    """Of what was counted, in that rank."""
    cores: int
    beside: int
    """Ranks on its host."""
    share: float
    """Of its time, in which it waits for a core."""
    words: str


def more_than_cores(
    view: View, count_of: Callable[[int], int], demand: Callable[[int], int]
) -> TooMany | None:
    """Only where ranks do wait for a core: what sleeps most of the time takes none.

    Args:
        view: The run.
        count_of: What is counted in a rank; more than one of it.
        demand: The cores that one rank with so many would fill.
    """
    found = []
    for rank in (parts.rank for parts in view.ranks):
        count, cores = count_of(rank), view.cores(rank)
        is_too_much = count > 1 and cores and demand(count) * view.ranks_beside(rank) > cores
        if is_too_much and view.waits_for_core(rank) >= MIN_WAIT:
            found.append(rank)
    if not found:
        return None
    worst = max(found, key=view.waits_for_core)
    share = view.waits_for_core(worst)
    words = f"{who(tuple(found), view.history.world_size)} wait{'s' * (len(found) == 1)} {share:.0%} of the time for a core"
    return TooMany(tuple(found), count_of(worst), view.cores(worst), view.ranks_beside(worst), share, words)
