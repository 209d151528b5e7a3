"""AR812 metrics-reduced-every-step: the script calls collectives of its own in every step."""

from __future__ import annotations

from collections import Counter

from allranks.perf.values import ms
from allranks.perf.view import Cause, View

CODE, NAME = "AR812", "metrics-reduced-every-step"
MIN_SHARE, MIN_S = 0.05, 0.0005
MIN_CALLS = 0.9
SMALL_BYTES = 1 << 16


def find(view: View) -> Cause | None:
    """Small ones: large ones are the script's own way of averaging gradients."""
    if len(view.ranks) < 2:
        return None
    calls = min(view.used(r.rank, "calls") for r in view.ranks)
    cost = min(r.per_step("collective") - view.used(r.rank, "buffers_s") for r in view.ranks)
    if calls < MIN_CALLS or cost < max(MIN_S, MIN_SHARE * view.step_s):
        return None
    small = Counter((c.op, c.line) for c in view.calls() if c.bytes <= SMALL_BYTES and c.op != "barrier")
    known = sum(small.values())
    if known < 0.5 * len(view.calls()) or not known:
        return None
    (op, line), _ = small.most_common(1)[0]
    return Cause(
        CODE,
        NAME,
        f"{calls:.1f} collectives of the script's own in each step take {ms(cost)} of {ms(view.step_s)}: {op} of a few values"
        + (f" at {line}" if line else ""),
        "add up on each rank, and reduce once in some fifty steps or at the end of the epoch (as run.sum of an iterable does)",
        tuple(r.rank for r in view.ranks),
        cost,
        cost / view.step_s,
    )
