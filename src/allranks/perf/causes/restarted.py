"""AR819 workers-restarted: loader workers are started anew in each pass, and the ranks wait until they read."""

from __future__ import annotations

from allranks.perf.values import ms
from allranks.perf.view import Cause, View, who

CODE, NAME = "AR819", "workers-restarted"
MIN_SHARE, MIN_PASSES, MIN_S = 0.05, 3, 0.05


def find(view: View) -> Cause | None:
    """By the time from the loop's beginning to its first batch, in the second pass and the third; no more than all waits for data."""
    slow: dict[int, tuple[float, float]] = {}
    for parts in view.ranks:
        rank = parts.rank
        facts, edges = view.facts(rank), view.edges(rank)
        pause, passes = float(facts.get("loader_first_s", 0.0)), int(facts.get("loader_passes", 0))
        if (
            not facts.get("loader_workers")
            or facts.get("loader_persistent", True)
            or edges is None
            or pause < MIN_S
        ):
            continue
        # The first pass began before the steps that are looked at.
        share = min(pause * (passes - 1) / max(edges[1].t - edges[0].t, 1e-9), parts.share("data"))
        if passes >= MIN_PASSES and share >= MIN_SHARE:
            slow[rank] = pause, share
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
        (f"{view.facts(worst)['loader_passes']} passes over it were begun",),
    )
