"""AR740 same-samples: ranks read the same samples in one pass, although a sampler is there that seems to divide them."""

from __future__ import annotations

from itertools import combinations

from allranks.watch.case import Case
from allranks.watch.noted import Note, by_rank, on_all, place, say, who
from allranks.watch.verdict import Verdict

CODE, NAME = "AR740", "same-samples"
FIX = "one seed for all ranks and one share each: DistributedSampler(dataset, seed=0) needs no rank, and gives each sample to one rank"


def find(case: Case) -> Verdict | None:
    """Where a data set that is the same on all ranks is divided: by what its samplers say, by what they gave."""
    for _, found in on_all(case, "pass", "loader", "number", "line"):
        one = next(iter(found.values()))
        if not one["training"] or "dataset" not in one or not is_one_data_set(found) or one["replacement"]:
            continue
        why = _by_samplers(found) or _by_first(found)
        if why:
            return _verdict(case, found, *why)
    for _, found in on_all(case, "seen", "loader", "number", "line"):
        passes = of_same_loader(case, found)
        one = next(iter(passes.values()), None)
        if one is None or not one["training"] or not is_one_data_set(passes) or one["replacement"]:
            continue
        if all(n["samples"] >= one["dataset"]["length"] > 0 for n in found.values()):
            continue  # AR741
        if why := _by_sketch(found):
            return _verdict(case, passes, *why)
    return None


def is_one_data_set(found: dict[int, Note]) -> bool:
    """Whether the ranks' data sets are the same as far as their attributes tell."""
    sets = [n.get("dataset") or {} for n in found.values()]
    return len({s.get("hash") for s in sets}) == 1 and bool(sets[0].get("is_telling"))


def of_same_loader(case: Case, found: dict[int, Note]) -> dict[int, Note]:
    """The first note of the loaders that `found` speaks of."""
    out = {}
    for rank, note in found.items():
        own = by_rank(case, "pass").get(rank, [])
        first = next((n for n in own if n["loader"] == note["loader"] and "dataset" in n), None)
        if first is not None:
            out[rank] = first
    return out if len(out) == len(found) else {}


def _by_samplers(found: dict[int, Note]) -> tuple[list[int], str, str] | None:
    """What DistributedSamplers say of themselves."""
    if any(n["num_replicas"] < 2 for n in found.values()):
        return None
    seeds = {r: n["seed"] for r, n in found.items()}
    if len(set(seeds.values())) > 1 and any(n["shuffle"] for n in found.values()):
        said = ", ".join(f"{seed} on rank {r}" for r, seed in seeds.items())
        return (
            sorted(found),
            "their samplers have different seeds",
            f"seed {said}: each rank takes its share of another order",
        )
    places = {r: n["sampler_rank"] for r, n in found.items()}
    for a, b in combinations(places, 2):
        if places[a] == places[b] >= 0:
            return [a, b], "their samplers take the same share", f"both samplers have rank={places[a]}"
    return None


def _by_first(found: dict[int, Note]) -> tuple[list[int], str, str] | None:
    """The first batches are the same, of a sampler that gives less than everything."""
    for a, b in combinations(found, 2):
        one, other = found[a], found[b]
        less = 0 <= one["share"] < one["dataset"]["length"]
        if one["hash"] == other["hash"] and one["count"] >= 3 and len(set(one["first"])) > 2 and less:
            return [a, b], "the first batches are the same", f"their first samples: {_some(one['first'])}"
    return None


def _by_sketch(found: dict[int, Note]) -> tuple[list[int], str, str] | None:
    """Which of the samples with the smallest hashes two ranks both saw."""
    for a, b in combinations(found, 2):
        one, other = found[a], found[b]
        if one["kept"] != one["distinct"] or other["kept"] != other["distinct"]:
            continue  # drawn with replacement
        both = set(one["sketch"]) & set(other["sketch"])
        if len(both) >= 8 and len(both) > 0.04 * min(len(one["sketch"]), len(other["sketch"])):
            share = 100 * len(both) / max(1, min(len(one["sketch"]), len(other["sketch"])))
            return (
                [a, b],
                f"{share:.0f} % of them are the same",
                f"samples {_some(sorted(both))} were read by both",
            )
    return None


def _some(values: list[int]) -> str:
    return ", ".join(map(str, values[:6])) + (" ..." if len(values) > 6 else "")


def _verdict(case: Case, found: dict[int, Note], ranks: list[int], short: str, fact: str) -> Verdict:
    one = next(iter(found.values()))
    return say(
        case,
        CODE,
        NAME,
        f"{who(case, ranks)} read the same samples of {one['dataset']['class']} in one epoch: {short} ({one['sampler']})",
        ranks,
        where=[place(found[r]) for r in ranks],
        facts=[fact, f"the data set has {one['dataset']['length']} samples and is the same on all ranks"],
        fix=FIX,
    )
