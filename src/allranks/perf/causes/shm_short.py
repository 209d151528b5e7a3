"""AR818 shm-nearly-full: loader workers hand their batches over through /dev/shm, and it is nearly full."""

from __future__ import annotations

from allranks.perf.hosts import shm_used
from allranks.perf.view import Cause, View

CODE, NAME = "AR818", "shm-nearly-full"
FULL = 0.8
PREFETCH = 2


def find(view: View) -> Cause | None:
    """Once it is full, workers die of a bus error: AR208."""
    for parts in view.ranks:
        size, workers = (
            int(view.node_facts(parts.rank).get("shm_bytes", 0)),
            view.facts(parts.rank).get("loader_workers", 0),
        )
        used = shm_used(view.node(parts.rank), parts.since, parts.until)
        if not size or not workers or used < FULL * size:
            continue
        beside = view.ranks_beside(parts.rank)
        ranks, each = f"{beside} rank{'s' * (beside != 1)}", f"{workers} loader worker{'s' * (workers != 1)}"
        return Cause(
            CODE,
            NAME,
            f"/dev/shm was {used / size:.0%} full ({used / 1e6:.0f} of {size / 1e6:.0f} MB): {ranks} with {each} each keep batches there",
            "a container with more of it (docker run --shm-size=8g, or --ipc=host); else fewer loader workers or prefetch_factor=1",
            tuple(r.rank for r in view.ranks if view.rank(r.rank).node == view.rank(parts.rank).node),
            0.0,
            0.05,
            (
                f"each worker has up to {PREFETCH} batches in it unless prefetch_factor says otherwise",
                "a worker that finds it full ends with a bus error",
            ),
        )
    return None
