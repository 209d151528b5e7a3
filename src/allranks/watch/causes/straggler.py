"""AR800 straggler: one rank is slower than the others, which wait for it in every step."""

from __future__ import annotations

from allranks.watch.case import CROWDED, Case
from allranks.watch.evidence import Rank, Slow
from allranks.watch.verdict import Verdict, ranks_text

CODE, NAME = "AR800", "straggler"
STARVED = 0.3
ASLEEP = 0.4
MUCH = 0.5
"""Of the step: more than the load of a host that all ranks suffer from makes one late."""
_COMPUTE = ("forward", "backward", "optimizer")


def find(case: Case) -> Verdict | None:
    """Only where the trigger compared the ranks' times over some seconds; evidence.slow holds what it found."""
    slow = case.evidence.slow
    if case.evidence.trigger != "slow" or slow is None:
        return None
    rank = case.evidence.rank(slow.rank)
    if rank is None:
        return None
    # The kernel counts a wait for a core when it ends, so that a short look may miss it; the load of the last minute does not.
    lack_cores = all(r.run_queue_share >= STARVED or r.host_load > CROWDED for r in case.evidence.ranks)
    if lack_cores and slow.excess_s < MUCH * slow.step_s:
        return None  # all ranks lack a core, and one of them most: that is the load of the host
    others = [r.rank for r in case.evidence.ranks if r.rank != slow.rank]
    share = slow.excess_s / slow.step_s if slow.step_s else 0.0
    why, fix = _why(case, rank, slow)
    facts = [
        f"per step: {_ms(slow.own_s)} of its own work, {_ms(slow.others_s)} on the others; they wait {_ms(slow.excess_s)}",
        f"the excess is in the phase {slow.phase!r}: {why}",
    ]
    return case.verdict(
        CODE,
        NAME,
        f"{case.who([rank])} is a straggler: slower than the others by {_ms(slow.excess_s)} "
        f"per step; {ranks_text(others)} wait{'s' if len(others) == 1 else ''} for it",
        [rank],
        where=tuple(case.at(p) for p in slow.places) or case.stands_at(rank),
        since_s=slow.since_s,
        others=f"{ranks_text(others)} spend{'s' if len(others) == 1 else ''} {share:.0%} of each step waiting in the gradient all-reduce",
        facts=facts,
        fix=fix,
    )


def _why(case: Case, rank: Rank, slow: Slow) -> tuple[str, str]:
    """What keeps it, by what it uses while it is slow, and what to do."""
    starved = max((r.run_queue_share for r in case.evidence.ranks if r.rank != rank.rank), default=0.0)
    lost_s = (
        rank.run_queue_share - starved
    ) * slow.step_s  # if it explains what the others wait; else it is only there, too
    if (
        rank.run_queue_share > STARVED
        and rank.run_queue_share > 2 * starved
        and lost_s >= 0.5 * slow.excess_s
    ):
        return (
            f"it waits {rank.run_queue_share:.0%} of its time for a processor core, of which {rank.host} has too few for it",
            f"more cores for it (affinity, container limit); see what else runs on {rank.host} (top): the script need not be the cause",
        )
    if slow.phase == "data":
        return (
            "it waits for its loader longer than the others",
            "more loader workers or cheaper samples on that rank; uneven or longer samples; its disk",
        )
    if slow.phase in _COMPUTE:
        if rank.main_cpu_share and rank.main_cpu_share < ASLEEP:
            why = "little of it is processor time: it waits for something inside the model, or for a device"
        else:
            why = "it computes more than the others, or on a slower core or device; which of them is not decided"
        return (
            why,
            "uneven batches, work that only this rank does, or a slower device; run the ranks with equal batches to see",
        )
    return (
        "code of the script between the calls of torch",
        "look at this line on that rank: work that the others do not do",
    )


def _ms(value: float) -> str:
    return f"{value * 1e3:.0f} ms"
