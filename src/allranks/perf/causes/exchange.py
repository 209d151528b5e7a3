"""AR807 steps-too-short: exchanging gradients takes longer than there is work to hide it behind."""

from __future__ import annotations

from math import ceil

from allranks.perf.values import ms
from allranks.perf.view import Cause, View

CODE, NAME = "AR807", "steps-too-short"
MIN_SHARE, MIN_S = 0.25, 0.001
WANTED_SHARE = 0.1


def find(view: View) -> Cause | None:
    """Exchange without waiting for others: what remains if all ranks come at once."""
    if len(view.ranks) < 2 or not all(r.is_exchange_known for r in view.ranks):
        return None
    cost = min(r.per_step("exchange") for r in view.ranks)  # what it takes the one that waits least
    if cost < MIN_S or cost < MIN_SHARE * view.step_s:
        return None
    work = view.mean("forward") + view.mean("backward")
    rest = view.step_s - cost
    times = max(2, ceil(cost / max(WANTED_SHARE * rest, 1e-6)))
    size = view.replica(view.ranks[0].rank).get("parameter_bytes", 0)
    facts = [f"forward and backward compute take {ms(work)}"]
    if size:
        facts.append(f"{size / 1e6:.1f} MB of gradients: {size / 1e6 / cost:.0f} MB a second")
    return Cause(
        CODE,
        NAME,
        f"exchanging gradients takes {ms(cost)} of each {ms(view.step_s)} step that nothing hides: the step is too short for it",
        f"larger batches, or accumulate {min(times, 32)} of them before each exchange (no_sync around forward and backward of all but the "
        "last); bf16_compress_hook halves what is sent; on one host run.model exchanges through shared memory",
        tuple(r.rank for r in view.ranks),
        cost,
        cost / view.step_s,
        tuple(facts),
    )
