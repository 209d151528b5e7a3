"""Why are two runs not the same? The cause of the first update that differs, or of what differs outside the updates."""

from __future__ import annotations

from collections import Counter

from allranks.parity.causes import CAUSES, Finding, listed, unknown
from allranks.parity.compare import Comparison
from allranks.parity.recording import Recording


def initial_weights(result: Comparison, world_size: int) -> Finding:
    """Different weights before the first update."""
    names = list(result.initial)
    ranks = sorted(set(result.initial.values()))
    if 0 in ranks:
        what = f"the initial weights on {world_size} ranks are not those on one: {listed(names)}"
        why = "likely they are drawn after a seed that depends on the number of ranks, or are not seeded"
    else:
        what = f"rank {ranks[0]} begins with other weights than rank 0: {listed(names)}"
        why = "likely each rank draws its own, and nothing makes them equal (DistributedDataParallel and run.model do)"
    return Finding(
        "AR704",
        what,
        why,
        "torch.manual_seed(0) before the model is built, on every rank; and run.model(net)",
        0,
        names[0],
        ranks[0],
    )


def find_cause(one: Recording, many: Recording, result: Comparison) -> Finding | None:
    """Why the two part; None if they do not."""
    if result.initial:
        return initial_weights(result, many.world_size)
    if result.case is not None:
        case = result.case
        return next((found for cause in CAUSES if (found := cause(case)) is not None), None) or unknown(case)
    return fewer_updates(many, result) or evaluation(one, many)


def fewer_updates(many: Recording, result: Comparison) -> Finding | None:
    """All common updates are equal, but not their number."""
    counts = [len(rank.steps) for rank in many.ranks]
    at = result.updates + 1
    if len(set(counts)) > 1:
        rank = counts.index(min(counts))
        return Finding(
            "AR712",
            f"rank {rank} made {counts[rank]} updates, another rank {max(counts)}",
            "it left out updates that other ranks made, or ended before them",
            "decide together whether an update is made: run.any(...), run.agree(...)",
            at,
            rank=rank,
        )
    if result.counts[0] == result.counts[1]:
        return None
    return Finding(
        "AR702",
        f"the script made {result.counts[0]} updates on one rank and {result.counts[1]} on {many.world_size}",
        "the samples of an epoch, or of an update, depend on the number of ranks",
        "global_batch_size in run.loader, the same on any number of ranks",
        at,
    )


def evaluation(one: Recording, many: Recording) -> Finding | None:
    """An evaluation over other samples than on one rank."""
    for number, mine in enumerate(one.ranks[0].passes):
        theirs = [rank.passes[number] for rank in many.ranks if number < len(rank.passes)]
        wanted = Counter(mine.ids)
        # Every rank may go through all samples for itself: slow, but right.
        if not theirs or all(Counter(each.ids) == wanted for each in theirs):
            continue
        together = Counter(i for each in theirs for i in each.ids)
        if together == wanted:
            continue
        repeated, missing = together - wanted, wanted - together
        parts = [f"{listed(sorted(repeated, key=str))} more than once"] if repeated else []
        parts += [f"{listed(sorted(missing, key=str))} not at all"] if missing else []
        return Finding(
            "AR701",
            f"an evaluation (after update {mine.after}) counts {together.total()} samples on {many.world_size} ranks for "
            f"{wanted.total()} on one: {'; '.join(parts)}",
            "likely DistributedSampler, which repeats samples until every rank has as many, or drops the rest",
            "run.loader(test_set) gives each sample once",
            mine.after,
        )
    return None
