"""What is said of a run when it ends? A few lines: the step, where its time goes, what is worth changing, and which numbers to doubt."""

from __future__ import annotations

from allranks.perf.breakdown import PARTS, RankParts, breakdown
from allranks.perf.causes import MIN_S, MIN_STEPS, find_causes
from allranks.perf.remarks import find_remarks
from allranks.perf.values import History, ms
from allranks.perf.view import View

SHOWN = 3
DIFFERS = 0.1
"""A rank has a line of its own if one of its largest parts differs so much from the mean, as a share of the step."""
WORTH = 0.05
"""A cause is said if it takes so much of the step."""


def summary(history: History) -> list[str]:
    """The lines; of a run that was too short to say where its time went, only the remarks."""
    return [*_where_time_went(history), *_remarks(history)]


def _remarks(history: History) -> list[str]:
    """Each with its first line of code, where there is one."""
    return [
        line
        for one in find_remarks(history)
        for line in (f"{one.code} {one.title}", f"  why: {one.facts[0]}", f"  do: {one.fix}")
    ]


def _where_time_went(history: History) -> list[str]:
    found = breakdown(history)
    view = View(history, found)
    if view.steps < MIN_STEPS or view.seconds < MIN_S:
        return []
    largest = ", ".join(f"{PARTS[part]} {share:.0%}" for part, share in found.largest(SHOWN))
    first = (
        f", the first {found.first_step_s:.1f} s (not counted)"
        if found.first_step_s > 5 * found.median_step_s
        else ""
    )
    lines = [f"{view.steps} steps of {ms(found.median_step_s)} (median){first}: {largest}"]
    lines += _who_differs(view)
    causes = [c for c in find_causes(view) if c.share >= WORTH]
    if causes:
        lines += [f"{causes[0].code} {causes[0].title}", f"  do: {causes[0].fix}"]
    return lines


def _who_differs(view: View) -> list[str]:
    """The rank that differs most from the mean, if it does."""
    if len(view.ranks) < 2:
        return []

    def difference(rank: RankParts, part: str) -> float:
        return abs(rank.share(part) - view.share(part))

    rank, part = max(((r, p) for r in view.ranks for p in PARTS), key=lambda pair: difference(*pair))
    if difference(rank, part) < DIFFERS:
        return []
    slow = view.straggler
    shown = next((r for r in view.ranks if slow is not None and r.rank == slow.rank), rank)
    parts = sorted(PARTS, key=lambda p: -shown.share(p))[:SHOWN]
    return [f"rank {shown.rank}: " + ", ".join(f"{PARTS[p]} {shown.share(p):.0%}" for p in parts)]
