"""AR801 loader-bound: the step waits for its data."""

from __future__ import annotations

from math import ceil

from allranks.perf.values import ms
from allranks.perf.view import Cause, View, who

CODE, NAME = "AR801", "loader-bound"
MIN_SHARE, MIN_S = 0.15, 0.001


def find(view: View) -> Cause | None:
    """Ranks that wait for data for a good part of the step."""
    slow = [r for r in view.ranks if r.per_step("data") >= max(MIN_S, MIN_SHARE * r.step_s)]
    if not slow:
        return None
    worst = max(slow, key=lambda r: r.share("data"))
    lost = worst.per_step("data")
    ranks = tuple(r.rank for r in slow)
    wanted, facts = _workers(view, worst.rank, worst.step_s - lost, lost)
    has = view.facts(worst.rank).get("loader_workers", 0)
    where = view.facts(worst.rank).get("loader_line", "").rpartition("/")[2]
    if wanted <= has:
        fix = "more workers would not help: make a sample cheaper (decode less, cache, larger files), or send less per batch"
    else:
        fix = f"DataLoader(num_workers={wanted}, persistent_workers=True)" + (
            f", made at {where}" if where else ""
        )
        fix += _room(view, worst.rank, wanted)
    return Cause(
        CODE,
        NAME,
        f"{who(ranks, view.history.world_size)} wait{'s' * (len(ranks) == 1)} {ms(lost)} of {ms(worst.step_s)} in each "
        f"step for data, with {has} loader worker{'s' * (has != 1)} a rank",
        fix,
        ranks,
        lost,
        lost / worst.step_s,
        facts,
    )


def _workers(view: View, rank: int, rest_s: float, lost_s: float) -> tuple[int, tuple[str, ...]]:
    """How many loader workers would feed a step of `rest_s`, by what a batch takes."""
    has, batches = view.facts(rank).get("loader_workers", 0), view.used(rank, "drawn") or 1.0
    batch = view.batch_s(rank) if has else lost_s / batches
    if not batch:
        return has + max(1, has), (f"what a worker needs for a batch is not known; {has} are too few",)
    wanted = max(1, ceil(1.1 * batch * batches / max(rest_s, 1e-4)))
    fact = f"a batch takes a worker {ms(batch)}, the rest of the step takes {ms(rest_s)}: {wanted} feed it"
    return wanted, (fact,)


def _room(view: View, rank: int, wanted: int) -> str:
    cores, ranks = view.cores(rank), view.ranks_beside(rank)
    if not cores or (wanted + 1) * ranks <= cores:
        return ""
    return f"; but {ranks} ranks with {wanted} workers each are more than the {cores} cores of this host: make a sample cheaper, too"
