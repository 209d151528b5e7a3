"""AR802 too-many-loader-workers: workers and ranks together are more than the cores, and ranks wait for a core."""

from __future__ import annotations

from allranks.perf.causes import bound_to_one_core
from allranks.perf.causes.more_than_cores import more_than_cores
from allranks.perf.view import Cause, View

CODE, NAME = "AR802", "too-many-loader-workers"


def find(view: View) -> Cause | None:
    """Only where ranks do wait for a core: workers that sleep most of the time take none."""
    if bound_to_one_core.find(view):
        return None  # the cores are there
    found = more_than_cores(
        view, lambda rank: view.facts(rank).get("loader_workers", 0), lambda workers: workers + 1
    )
    if found is None:
        return None
    processes = (found.count + 1) * found.beside
    return Cause(
        CODE,
        NAME,
        f"{found.beside} ranks with {found.count} loader workers each are {processes} processes for {found.cores} cores; {found.words}",
        f"DataLoader(num_workers={max(1, found.cores // found.beside - 1)})",
        found.ranks,
        found.share * view.step_s,
        found.share,
    )
