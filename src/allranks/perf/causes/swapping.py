"""AR806 memory-swapped: pages of a rank have to come back from the disk in every step."""

from __future__ import annotations

from allranks.perf.view import Cause, View, who

CODE, NAME = "AR806", "memory-swapped"
MIN_A_SECOND, MIN_A_STEP = 20.0, 1.0


def find(view: View) -> Cause | None:
    """Major faults, all through the run: reading a mapped file once makes some, too."""
    faults = {r.rank: view.used(r.rank, "major_faults") for r in view.ranks}
    ranks = tuple(
        n
        for n, f in faults.items()
        if f >= MIN_A_STEP and f >= MIN_A_SECOND * view.step_s and _goes_on(view, n)
    )
    if not ranks:
        return None
    most = max(faults[n] for n in ranks)
    return Cause(
        CODE,
        NAME,
        f"{who(ranks, view.history.world_size)} wait{'s' * (len(ranks) == 1)} for the disk {most:.0f} times a step: memory "
        "was swapped out, or a mapped file does not fit into memory",
        "fewer loader workers, smaller batches or a smaller cache; free -m and vmstat 1 show what is short",
        ranks,
        0.0,
        0.05,
    )


def _goes_on(view: View, rank: int) -> bool:
    edges = view.edges(rank)
    if edges is None:
        return False
    middle = [s for s in view.rank(rank).samples if edges[0].t < s.t < edges[1].t]
    half = middle[len(middle) // 2] if middle else edges[0]
    return edges[1].major_faults - half.major_faults >= 0.25 * (edges[1].major_faults - edges[0].major_faults)
