"""AR814 checkpoint-stalls: saving holds the training up."""

from __future__ import annotations

from allranks.perf.view import Cause, View, who

CODE, NAME = "AR814", "checkpoint-stalls"
MIN_SHARE = 0.08


def find(view: View) -> Cause | None:
    """Over the whole time looked at."""
    if not view.ranks:
        return None
    worst = max(view.ranks, key=lambda r: r.share("checkpoint"))
    if worst.share("checkpoint") < MIN_SHARE:
        return None
    ranks = tuple(r.rank for r in view.ranks if r.share("checkpoint") >= MIN_SHARE)
    total, share = worst.parts["checkpoint"], worst.share("checkpoint")
    return Cause(
        CODE,
        NAME,
        f"{who(ranks, view.history.world_size)} spent {total:.1f} s of {worst.until - worst.since:.0f} s on saving and loading "
        f"({share:.0%}), and nothing was trained meanwhile",
        "save less often, save from a copy in the background (run.save_every does), or to a faster disk",
        ranks,
        worst.per_step("checkpoint"),
        share,
    )
