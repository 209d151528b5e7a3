"""What makes a run slow? One file a cause; each is a function of a View and says nothing where a number is missing."""

from __future__ import annotations

from collections.abc import Callable

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
    slow_rank,
    swapping,
    threads,
    unused,
    workers,
)
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
)
MIN_STEPS, MIN_S = 20, 2.0
"""Of a shorter run nothing is said: it warms up."""


def find_causes(view: View) -> list[Cause]:
    """What makes this run slow, the dearest first. Nothing is said of what costs little."""
    if view.steps < MIN_STEPS or view.seconds < MIN_S:
        return []
    causes = [cause for find in CAUSES if (cause := find(view)) is not None]
    return sorted(causes, key=lambda cause: -cause.share)
