"""AR803 too-many-threads: OpenMP threads of all ranks are more than the cores."""

from __future__ import annotations

from allranks.perf.causes.more_than_cores import more_than_cores
from allranks.perf.view import Cause, View

CODE, NAME = "AR803", "too-many-threads"


def find(view: View) -> Cause | None:
    """Only where ranks do wait for a core."""
    found = more_than_cores(view, view.threads, lambda threads: threads)
    if found is None:
        return None
    fits, asked = max(1, found.cores // found.beside), view.facts(found.ranks[0]).get("omp_threads", 0)
    if asked and asked <= fits:
        fix = f"torch.set_num_threads({fits}), which the script calls with more; or leave it out: OMP_NUM_THREADS={asked} fits"
    else:
        fix = f"OMP_NUM_THREADS={fits} (what `allranks run` sets where you do not)"
    return Cause(
        CODE,
        NAME,
        f"{found.beside} ranks compute with {found.count} threads each on {found.cores} cores; {found.words}",
        fix,
        found.ranks,
        found.share * view.step_s,
        found.share,
    )
