"""AR804 bound-to-one-core: a rank may use one core only, although its host has more for it."""

from __future__ import annotations

from allranks.perf.view import Cause, View, who

CODE, NAME = "AR804", "bound-to-one-core"


def find(view: View) -> Cause | None:
    """The agent that started the rank may use more: something narrowed it since, such as an import."""
    bound = [
        r.rank
        for r in view.ranks
        if view.facts(r.rank).get("affinity", 0) == 1 and _is_for_nothing(view, r.rank)
    ]
    if not bound:
        return None
    cores, beside = view.cores(bound[0]), view.ranks_beside(bound[0])
    wait = max(view.waits_for_core(n) for n in bound)
    return Cause(
        CODE,
        NAME,
        f"{who(tuple(bound), view.history.world_size)} may run on 1 core only; this host has {cores} for {beside} ranks",
        "find the import or the launcher that binds it (OMP_PROC_BIND, KMP_AFFINITY, GOMP_CPU_AFFINITY, a library that calls "
        "sched_setaffinity), or call os.sched_setaffinity(0, range(os.cpu_count())) after the imports",
        tuple(bound),
        wait * view.step_s,
        max(wait, 0.01),
        (f"its main thread waits {wait:.0%} of the time for that core" + _workers(view, bound[0]),),
    )


def _workers(view: View, rank: int) -> str:
    count = view.facts(rank).get("loader_workers", 0)
    return (
        f", and its {count} loader worker{'s' * (count != 1)} share it"
        if count
        else ", loader workers it would start share it"
    )


def _is_for_nothing(view: View, rank: int) -> bool:
    """There are two cores a rank, or ranks share one while another is free."""
    cores, beside = view.cores(rank), view.ranks_beside(rank)
    if cores // max(1, beside) >= 2:
        return True
    on = [r.facts.get("cpus") for r in view.history.ranks if r.node == view.rank(rank).node]
    together = {cpu for cpus in on for cpu in cpus or ()}
    return all(on) and len(together) < min(cores, beside)
