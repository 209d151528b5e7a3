"""AR800 straggler, from the history: the rank that the others wait for."""

from __future__ import annotations

from allranks.perf.straggler import OF_A_PART, OTHERS, Straggler
from allranks.perf.values import ms
from allranks.perf.view import Cause, View

CODE, NAME = "AR800", "straggler"


FIXES = {
    "log": "log once in some fifty steps: what one rank logs, all wait for",
    "checkpoint": "save less often, or from a copy in the background (run.save_every does): all wait for the rank that saves",
    "evaluate": "evaluate on all ranks, each its share (run.evaluate does)",
    "data": "look at its disk, its share of the samples (longer ones?) and its loader workers",
}
"""By the part in which it spends more than the others, where that says what to change."""


def find(view: View) -> Cause | None:
    """As perf.straggler says."""
    slow = view.straggler
    if slow is None:
        return None
    facts = list(slow.facts)
    if slow.caused:
        facts.append(f"{slow.caused:.0%} of all waiting in the steps that were looked at was for it")
    if not slow.is_decided:
        facts.append("why is not decided by what was measured")
    return Cause(
        CODE,
        NAME,
        f"rank {slow.rank} on {slow.host} is a straggler: the others wait {ms(slow.excess_s)} for it in each step "
        f"({slow.share:.0%}); {slow.why}",
        _fix(slow),
        (slow.rank,),
        slow.excess_s,
        slow.share,
        tuple(facts),
    )


def _fix(slow: Straggler) -> str:
    if slow.why.startswith(OTHERS):
        return (
            f"see what else runs on {slow.host} (top) and give the job its cores: the script is not the cause"
        )
    if slow.part in FIXES and slow.why.startswith(OF_A_PART):
        return FIXES[slow.part]
    return "make its work as long as the others': even batches, equal devices, its cores for itself"
