"""AR811 no-sync-without-forward: only the backward is inside no_sync, so gradients are exchanged all the same."""

from __future__ import annotations

from allranks.perf.view import Cause, View, who

CODE, NAME = "AR811", "no-sync-without-forward"


def find(view: View) -> Cause | None:
    """DDP decides in forward whether the backward that follows exchanges."""
    ranks = tuple(r.rank for r in view.ranks if view.replica(r.rank).get("uncovered_forward"))
    if not ranks:
        return None
    cost = max(r.per_step("exchange") for r in view.ranks)
    told = view.replica(ranks[0])
    line = str(told.get("uncovered_line", "")).rpartition("/")[2]
    line = f" ({line})" if line else ""
    exchanges, updates = int(told.get("exchanges", 0)), int(told.get("updates", 0))
    each = f"{exchanges} times in {updates} steps" if exchanges > updates > 0 else "in every micro-step"
    return Cause(
        CODE,
        NAME,
        f"{who(ranks, view.history.world_size)} call backward inside no_sync{line}, but forward outside: gradients are "
        f"exchanged {each}",
        "put the forward of the micro-steps that only accumulate inside `with model.no_sync():`, too; with allranks, run.step does it "
        "where allranks.start(accumulation_steps=) says how many",
        ranks,
        cost,
        max(0.02, cost / view.step_s if view.step_s else 0.0),
    )
