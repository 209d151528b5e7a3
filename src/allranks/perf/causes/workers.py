"""AR802 too-many-loader-workers: workers and ranks together are more than the cores, and ranks wait for a core."""

from __future__ import annotations

from allranks.perf.view import Cause, View, who

CODE, NAME = "AR802", "too-many-loader-workers"
MIN_WAIT = 0.1


def find(view: View) -> Cause | None:
    """Only where ranks do wait for a core: workers that sleep most of the time take none."""
    crowded = []
    for parts in view.ranks:
        n = parts.rank
        workers, cores = view.facts(n).get("loader_workers", 0), view.cores(n)
        if (
            workers > 1
            and cores
            and (workers + 1) * view.ranks_beside(n) > cores
            and view.waits_for_core(n) >= MIN_WAIT
        ):
            crowded.append(n)
    if not crowded:
        return None
    n = max(crowded, key=view.waits_for_core)
    workers, cores, beside, share = (
        view.facts(n)["loader_workers"],
        view.cores(n),
        view.ranks_beside(n),
        view.waits_for_core(n),
    )
    fits = max(1, cores // beside - 1)
    return Cause(
        CODE,
        NAME,
        f"{beside} ranks with {workers} loader workers each are {(workers + 1) * beside} processes for {cores} cores; "
        f"{who(tuple(crowded), view.history.world_size)} wait {share:.0%} of the time for a core",
        f"DataLoader(num_workers={fits})",
        tuple(crowded),
        share * view.step_s,
        share,
    )
