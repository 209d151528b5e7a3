"""AR224 endless-loop: a rank computes and does not come to the collective."""

from __future__ import annotations

from allranks.watch.case import Case, stuck_at
from allranks.watch.verdict import Verdict

CODE, NAME = "AR224", "endless-loop"
STARVED = 0.5
"""Share of its time that the rank waits for a core: then its slowness is not its own."""


def find(case: Case) -> Verdict | None:
    found = case.doing("loop")
    if not found:
        return None
    rank = found[0][0]
    if rank.run_queue_share >= STARVED:
        return stuck_at(
            case,
            CODE,
            NAME,
            found,
            f"gets a core in {rank.main_cpu_share:.0%} of its time only, and does not come (a busy host, an endless loop, or long work)",
            facts=[
                f"it is ready to run and waits for a core {rank.run_queue_share:.0%} of its time: which it is is not decided"
            ],
            fix=f"see what else runs on {rank.host} (top): the script need not be the cause; where it is quiet, look at this line",
            confidence="likely",
        )
    return stuck_at(
        case,
        CODE,
        NAME,
        found,
        "computes on and does not come (an endless loop, or very long work)",
        facts=["its main thread uses the processor, at a line of Python"],
        fix="look at the loop at this line: does its condition ever end on this rank?",
    )
