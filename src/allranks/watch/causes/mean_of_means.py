"""AR727 samples-count-unequally: losses are means over unequal numbers of samples, and each mean counts the same."""

from __future__ import annotations

from allranks.perf.mean_of_means import CODE, FIX, KIND, NAME
from allranks.perf.mean_of_means import find as find_unequal
from allranks.watch.case import Case
from allranks.watch.noted import by_rank, say, who
from allranks.watch.reading import place_of
from allranks.watch.verdict import Verdict

__all__ = ["CODE", "NAME", "find"]


def find(case: Case) -> Verdict | None:
    """By what each rank's losses are means of, and the factors before them."""
    found = find_unequal(by_rank(case, KIND), case.evidence.world_size)
    if found is None:
        return None
    return say(
        case,
        CODE,
        NAME,
        f"{who(case, found.ranks())}: {found.title()}",
        found.ranks(),
        where=[place_of(line) for line in found.lines()],
        facts=found.facts(),
        fix=FIX,
        step=found.step.number,
        confidence="likely",
    )
