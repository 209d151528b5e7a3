"""AR746 padded-evaluation: an evaluation counts samples twice, which the sampler repeats so that all ranks have equally many."""

from __future__ import annotations

from allranks.watch.case import Case
from allranks.watch.noted import by_rank, place, say, who
from allranks.watch.verdict import Verdict

CODE, NAME = "AR746", "padded-evaluation"
MIN_SHARE = 0.001
"""Of the samples that are counted twice; fewer change no metric that anybody prints."""
SMALL = 64
"""Elements at most of what is added up: sums and counts, no predictions."""


def find(case: Case) -> Verdict | None:
    """A pass without training, of a sampler that pads, after which sums were added up over the ranks."""
    found = {rank: own[0] for rank, own in sorted(by_rank(case, "evaluated").items())}
    one = next(iter(found.values()), None)
    if one is None or one["padded"] < MIN_SHARE * one["length"] or not _are_added(one["ops"]):
        return None
    count, length, world = one["padded"], one["length"], one["num_replicas"]
    # The sampler repeats the first of its order at the end: rank r has the places r, r + world, ...; the last `count` places are padding.
    ranks = (
        sorted(r for r, n in found.items() if n["sampler_rank"] >= world - count)
        if count < world
        else sorted(found)
    )
    repeated = "" if one["shuffle"] else f": indices {', '.join(map(str, range(min(count, 8))))}"
    return say(
        case,
        CODE,
        NAME,
        f"the evaluation counts {length + count} samples of {length}: {count} repeated on {who(case, ranks)}",
        ranks,
        where=[place(one)],
        facts=[
            f"{length} samples do not divide by {world} ranks, and DistributedSampler repeats {count} at the end{repeated}",
            f"after the loop the ranks added up their sums ({one['ops'][0][0]})",
        ],
        fix="leave out the repeated ones: the last sample of these ranks; or evaluate indices[rank::world_size] of a Subset\n"
        "run.evaluate(...) of allranks counts each sample once",
        confidence="likely",
    )


def _are_added(ops: list[list[object]]) -> bool:
    kinds = [(str(op), int(str(numel))) for op, numel in ops]
    has_sums = any(op in ("all_reduce", "reduce") and 0 < numel <= SMALL for op, numel in kinds)
    return has_sums and not any("gather" in op for op, _ in kinds)
