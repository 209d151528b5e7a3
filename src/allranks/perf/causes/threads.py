"""AR803 too-many-threads: OpenMP threads of all ranks are more than the cores."""

from __future__ import annotations

from allranks.perf.causes.more_than_cores import more_than_cores
from allranks.perf.view import Cause, View

CODE, NAME = "AR803", "too-many-threads"


def find(view: View) -> Cause | None:
    """Only where ranks do wait for a core."""
    found = more_than_cores(view, "omp_threads", lambda threads: threads)
    if found is None:
        return None
    return Cause(
        CODE,
        NAME,
        f"{found.beside} ranks compute with {found.count} threads each on {found.cores} cores; {found.words}",
        f"OMP_NUM_THREADS={max(1, found.cores // found.beside)} (what `allranks run` sets where you do not)",
        found.ranks,
        found.share * view.step_s,
        found.share,
    )
