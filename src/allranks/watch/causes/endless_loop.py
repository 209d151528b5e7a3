"""AR224 endless-loop: a rank computes and does not come to the collective."""

from __future__ import annotations

from allranks.watch.case import Case, stuck_at
from allranks.watch.verdict import Verdict

CODE, NAME = "AR224", "endless-loop"


def find(case: Case) -> Verdict | None:
    found = case.doing("loop")
    if not found:
        return None
    return stuck_at(
        case,
        CODE,
        NAME,
        found,
        "computes on and does not come (an endless loop, or very long work)",
        facts=["its main thread uses the processor, at a line of Python"],
        fix="look at the loop at this line: does its condition ever end on this rank?",
    )
