"""AR810 buffers-sent-every-step: DDP sends rank 0's buffers to all ranks before every forward."""

from __future__ import annotations

from allranks.perf.values import ms
from allranks.perf.view import Cause, View

CODE, NAME = "AR810", "buffers-sent-every-step"
MIN_SHARE, MIN_S = 0.03, 0.0003


def find(view: View) -> Cause | None:
    """By what it costs the rank that waits for nobody."""
    if len(view.ranks) < 2 or not all(view.replica(r.rank).get("broadcast_buffers") for r in view.ranks):
        return None
    # Without the waiting; the script's own collectives are in the same part.
    cost = min(min(r.per_step("collective"), view.used(r.rank, "buffers_s")) for r in view.ranks)
    if cost < max(MIN_S, MIN_SHARE * view.step_s):
        return None
    count = view.replica(view.ranks[0].rank).get("buffers", 0)
    return Cause(
        CODE,
        NAME,
        f"sending {count or 'the'} buffers of rank 0 to all ranks takes {ms(cost)} of each {ms(view.step_s)} step",
        "DistributedDataParallel(..., broadcast_buffers=False), and send them before evaluating and saving if ranks must agree "
        "(run.model does)",
        tuple(r.rank for r in view.ranks),
        cost,
        cost / view.step_s,
    )
