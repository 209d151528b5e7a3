"""AR800 straggler: one rank is slower than the others, which wait for it in every step."""

from __future__ import annotations

from allranks.watch.case import Case
from allranks.watch.verdict import Verdict, ranks_text

CODE, NAME = "AR800", "straggler"


def find(case: Case) -> Verdict | None:
    """Only where the trigger compared the ranks' times over some seconds; evidence.slow holds what it found."""
    slow = case.evidence.slow
    if case.evidence.trigger != "slow" or slow is None:
        return None
    rank = case.evidence.rank(slow.rank)
    if rank is None:
        return None
    others = [r.rank for r in case.evidence.ranks if r.rank != slow.rank]
    share = slow.excess_s / slow.step_s if slow.step_s else 0.0
    where = tuple(case.at(p) for p in slow.places) or case.stands_at(rank)
    facts = [
        f"per step: {_ms(slow.own_s)} of its own work, {_ms(slow.others_s)} on the others; they wait {_ms(slow.excess_s)}",
        f"the excess is in the phase {slow.phase!r}",
    ]
    if rank.run_queue_share > 0.3:
        facts.append(
            f"it waits {rank.run_queue_share:.0%} of its time for a processor core: too many processes on {rank.host}"
        )
    return case.verdict(
        CODE,
        NAME,
        f"{case.who([rank])} is a straggler: slower than the others by {_ms(slow.excess_s)} "
        f"per step; {ranks_text(others)} wait{'s' if len(others) == 1 else ''} for it",
        [rank],
        where=where,
        since_s=slow.since_s,
        others=f"{ranks_text(others)} spend{'s' if len(others) == 1 else ''} {share:.0%} of each step waiting in the gradient all-reduce",
        facts=facts,
        fix="look at this line on that rank: uneven data, a slower disk or device, or work that the others do not do",
    )


def _ms(value: float) -> str:
    return f"{value * 1e3:.0f} ms"
