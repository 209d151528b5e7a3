"""AR805 no-cores-left: ranks are ready to run and get no core, for another reason than their own threads and workers."""

from __future__ import annotations

from allranks.perf.causes import bound_to_one_core, threads, workers
from allranks.perf.hosts import MIN_OTHERS
from allranks.perf.view import Cause, View, who

CODE, NAME = "AR805", "no-cores-left"
MIN_WAIT = 0.15
MIN_THROTTLED = 0.05


def find(view: View) -> Cause | None:
    """All ranks' share; one alone is a straggler."""
    if workers.find(view) or threads.find(view) or bound_to_one_core.find(view) or not view.ranks:
        return None
    waits = {r.rank: view.waits_for_core(r.rank) for r in view.ranks}
    ranks = tuple(n for n, share in waits.items() if share >= MIN_WAIT)
    throttled = max(_throttled(view, r.rank) for r in view.ranks)
    if throttled < MIN_THROTTLED and len(ranks) < max(1, len(waits) / 2):
        return None
    share = max(throttled, sum(waits.values()) / len(waits))
    if throttled >= MIN_THROTTLED:
        title = f"the container's processor limit is used up {throttled:.0%} of the time, and then nothing in it runs"
        fix = "give the container more processors (cpu.max, --cpus, resources.limits.cpu), or start fewer ranks or threads"
    else:
        title, fix = _who_has_them(view, ranks)
        title = f"{who(ranks, view.history.world_size)} wait{'s' * (len(ranks) == 1)} {share:.0%} of the time for one of the {title}"
    return Cause(CODE, NAME, title, fix, ranks or tuple(waits), share * view.step_s, share)


def _who_has_them(view: View, ranks: tuple[int, ...]) -> tuple[str, str]:
    cores, others = view.cores(ranks[0]), view.others_cores(ranks[0])
    if others is None:
        return (
            f"{cores} cores, which other processes have",
            "see what else runs on this host (top), or start fewer ranks",
        )
    if others >= MIN_OTHERS:
        return (
            f"{cores} cores: processes that are not this job's have {others:.1f} of them",
            "see what else runs on this host (top) and give the job its cores: the script is not the cause",
        )
    return (
        f"{cores} cores, which the ranks' own threads and processes have",
        "fewer ranks on this host, OMP_NUM_THREADS=1, or fewer threads of your own",
    )


def _throttled(view: View, rank: int) -> float:
    edges = view.edges(rank)
    if edges is None or edges[1].t <= edges[0].t:
        return 0.0
    return max(0.0, edges[1].throttled_s - edges[0].throttled_s) / (edges[1].t - edges[0].t)
