"""AR813 script-between-calls: much of the step is the script's own Python, such as printing, logging or reading values every step."""

from __future__ import annotations

from allranks.perf.values import ms
from allranks.perf.view import Cause, View, who

CODE, NAME = "AR813", "script-between-calls"
MIN_SHARE, MIN_S = 0.2, 0.002
PRINTED_BYTES = 8.0


def find(view: View) -> Cause | None:
    """On most ranks; on one alone it is a straggler."""
    slow = [
        r for r in view.ranks if r.per_step("python") + r.per_step("log") >= max(MIN_S, MIN_SHARE * r.step_s)
    ]
    if not slow or len(slow) <= len(view.ranks) / 2:
        return None
    if not any(r.parts.get("forward") for r in slow):
        return None  # nothing marks the forward of a model that is not wrapped: it counts as the script's own
    worst = max(slow, key=lambda r: r.share("python") + r.share("log"))
    cost = worst.per_step("python") + worst.per_step("log")
    ranks = tuple(r.rank for r in slow)
    facts = [f"logging takes {ms(worst.per_step('log'))} of it"] if worst.parts.get("log") else []
    printed = max(view.used(n, "printed") for n in ranks)
    if printed >= PRINTED_BYTES:
        facts.append(f"it prints {printed:.0f} bytes a step")
    return Cause(
        CODE,
        NAME,
        f"{who(ranks, view.history.world_size)} spend{'s' * (len(ranks) == 1)} {ms(cost)} of each {ms(worst.step_s)} step in the "
        "script's own code between the calls of torch",
        "print, log and .item() once in some fifty steps; prepare data in loader workers; see that the loss is cheap (it counts here)",
        ranks,
        cost,
        cost / worst.step_s,
        tuple(facts),
    )
