"""What makes a run slow? One file a cause; each is a function of a View and says nothing where a number is missing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from allranks.perf.causes import (
    bound_to_one_core,
    buckets,
    buffers,
    checkpoints,
    crowded,
    exchange,
    host_code,
    loader,
    matmul,
    metrics,
    no_sync,
    restarted,
    shm_short,
    slow_gpu,
    slow_link,
    slow_rank,
    swapping,
    threads,
    unused,
    workers,
)
from allranks.perf.hosts import MIN_OTHERS
from allranks.perf.straggler import OTHERS
from allranks.perf.view import Cause, View

__all__ = ["CAUSES", "Cause", "find_causes"]

CAUSES: tuple[Callable[[View], Cause | None], ...] = (
    slow_rank.find,
    loader.find,
    workers.find,
    threads.find,
    bound_to_one_core.find,
    crowded.find,
    swapping.find,
    exchange.find,
    buckets.find,
    unused.find,
    buffers.find,
    no_sync.find,
    metrics.find,
    host_code.find,
    checkpoints.find,
    matmul.find,
    slow_link.find,
    slow_gpu.find,
    shm_short.find,
    restarted.find,
)
MEASURED = {"AR801", "AR802", "AR803", "AR807", "AR808", "AR810", "AR812", "AR813"}
"""Judged by how long something took."""
MIN_STEPS, MIN_S = 20, 2.0
"""Of a shorter run nothing is said: it warms up."""


def find_causes(view: View) -> list[Cause]:
    """What makes this run slow, the dearest first. Nothing is said of what costs little."""
    if view.steps < MIN_STEPS or view.seconds < MIN_S:
        return []
    causes = [cause for find in CAUSES if (cause := find(view)) is not None]
    if any(cause.code == slow_link.CODE for cause in causes):
        causes = [
            cause for cause in causes if cause.code != exchange.CODE
        ]  # not the step is short, the link is slow
    if _is_only_the_load(view, causes):
        causes = [cause for cause in causes if cause.code != slow_rank.CODE]
    return sorted((_beside_others(view, cause) for cause in causes), key=lambda cause: -cause.share)


def _is_only_the_load(view: View, causes: list[Cause]) -> bool:
    """Where others have the cores of all ranks, one of them gets fewest: that is the load once more, and no straggler."""
    slow, load = view.straggler, next((cause for cause in causes if cause.code == crowded.CODE), None)
    is_by_others = slow is not None and slow.why.startswith(OTHERS)
    return is_by_others and load is not None and len(load.ranks) == len(view.ranks)


def _beside_others(view: View, cause: Cause) -> Cause:
    """What a rank needs for something is longer while others have its cores: the script is not to blame for that part."""
    if cause.code not in MEASURED or not cause.ranks:
        return cause
    number = max((r.rank for r in view.ranks), key=view.waits_for_core)
    others, waits = view.others_cores(number), view.waits_for_core(number)
    if others is None or others < MIN_OTHERS or waits < crowded.MIN_WAIT:
        return cause
    fact = (
        f"measured while other processes had {others:.1f} cores and rank {number} waited {waits:.0%} of the time for one: "
        "measure again on a quiet host"
    )
    return replace(cause, facts=(*cause.facts, fact))
