"""AR819 workers-restarted: loader workers are started anew in each pass, and the ranks wait until they read."""

from __future__ import annotations

from allranks.perf.values import ms
from allranks.perf.view import Cause, View, who

CODE, NAME = "AR819", "workers-restarted"
MIN_SHARE, MIN_PASSES, MIN_S = 0.05, 3, 0.05


def find(view: View) -> Cause | None:
    """By the time from the loop's beginning to its first batch, in the second pass and the third."""
    slow: dict[int, tuple[float, float]] = {}
    for rank in (r.rank for r in view.ranks):
        facts, edges = view.facts(rank), view.edges(rank)
        pause, passes = float(facts.get("loader_first_s", 0.0)), int(facts.get("loader_passes", 0))
        if (
            not facts.get("loader_workers")
            or facts.get("loader_persistent", True)
            or edges is None
            or pause < MIN_S
        ):
            continue
        share = pause * passes / max(edges[1].t - edges[0].t, 1e-9)
        if passes >= MIN_PASSES and share >= MIN_SHARE:
            slow[rank] = pause, min(1.0, share)
    if not slow:
        return None
    worst = max(slow, key=lambda rank: slow[rank][1])
    pause, share = slow[worst]
    workers, ranks = view.facts(worst)["loader_workers"], tuple(sorted(slow))
    starts = "starts" if len(ranks) == 1 else "start"
    each = f"{workers} loader worker{'s' * (workers != 1)}"
    where = view.facts(worst).get("loader_line", "").rpartition("/")[2]
    return Cause(
        CODE,
        NAME,
        f"{who(ranks, view.history.world_size)} {starts} {each} anew in each pass: {ms(pause)} until its first batch, "
        f"{share:.0%} of the time",
        "DataLoader(..., persistent_workers=True)"
        + (f", of the loop at {where}" if where else "")
        + "; fewer imports at the top of the script, "
        "where workers are spawned",
        ranks,
        share * view.step_s,
        share,
        (f"{view.facts(worst)['loader_passes']} passes were begun",),
    )
