"""AR803 too-many-threads: OpenMP threads of all ranks are more than the cores."""

from __future__ import annotations

from allranks.perf.view import Cause, View, who

CODE, NAME = "AR803", "too-many-threads"
MIN_WAIT = 0.1


def find(view: View) -> Cause | None:
    """Only where ranks do wait for a core."""
    crowded = []
    for parts in view.ranks:
        n = parts.rank
        threads, cores = view.facts(n).get("omp_threads", 0), view.cores(n)
        if (
            threads > 1
            and cores
            and threads * view.ranks_beside(n) > cores
            and view.waits_for_core(n) >= MIN_WAIT
        ):
            crowded.append(n)
    if not crowded:
        return None
    n = max(crowded, key=view.waits_for_core)
    threads, cores, beside, share = (
        view.facts(n)["omp_threads"],
        view.cores(n),
        view.ranks_beside(n),
        view.waits_for_core(n),
    )
    return Cause(
        CODE,
        NAME,
        f"{beside} ranks compute with {threads} threads each on {cores} cores; "
        f"{who(tuple(crowded), view.history.world_size)} wait {share:.0%} of the time for a core",
        f"OMP_NUM_THREADS={max(1, cores // beside)} (what `allranks run` sets where you do not)",
        tuple(crowded),
        share * view.step_s,
        share,
    )
