"""AR741 not-divided: every rank trains on the whole data set."""

from __future__ import annotations

from allranks.watch.case import Case
from allranks.watch.causes.same_samples import is_one_data_set, of_same_loader
from allranks.watch.noted import Note, on_all, place, say, who
from allranks.watch.verdict import Verdict

CODE, NAME = "AR741", "not-divided"
MIN_SAMPLES = 16


def find(case: Case) -> Verdict | None:
    """DDP, one data set, and a pass that gives all of it to each rank."""
    if not all(r.record and r.record.model for r in case.evidence.ranks):
        return None
    for _, found in on_all(case, "pass", "loader", "number", "line"):
        if "dataset" in next(iter(found.values())) and _is_whole(found):
            return _verdict(case, found, found)
    for _, seen in on_all(case, "seen", "loader", "number", "line"):
        found = of_same_loader(case, seen)
        if found and _is_candidate(found) and all(_covers(seen[r], found[r]) for r in seen):
            return _verdict(case, found, found)
    return None


def _is_candidate(found: dict[int, Note]) -> bool:
    one = next(iter(found.values()))
    return bool(
        one["training"]
        and not one["iterable"]
        and not one["replacement"]
        and one["num_replicas"] < 2
        and one["dataset"]["length"] >= MIN_SAMPLES
        and is_one_data_set(found)
    )


def _is_whole(found: dict[int, Note]) -> bool:
    return _is_candidate(found) and all(
        n["is_torchs"] and n["share"] == n["dataset"]["length"] for n in found.values()
    )


def _covers(seen: Note, noted: Note) -> bool:
    return seen["samples"] >= noted["dataset"]["length"] and seen["distinct"] == seen["kept"]


def _verdict(case: Case, found: dict[int, Note], firsts: dict[int, Note]) -> Verdict:
    one, ranks = next(iter(found.values())), sorted(found)
    size, world = one["dataset"]["length"], len(ranks)
    is_same = len({n["hash"] for n in firsts.values()}) == 1
    order = (
        "in the same order: all ranks compute the same gradient, and the average is that of one rank"
        if is_same
        else "each in an order of its own"
    )
    return say(
        case,
        CODE,
        NAME,
        f"{who(case, ranks)} each read all {size} samples of {one['dataset']['class']}: the data set is not divided ({one['sampler']})",
        ranks,
        where=[place(one)],
        facts=[
            order,
            f"an epoch is {size * world} samples, {world} times the data set; a step costs as much, and saves nothing",
        ],
        fix="sampler = DistributedSampler(dataset); DataLoader(dataset, sampler=sampler, ...) without shuffle=True\n"
        "in each epoch: sampler.set_epoch(epoch)",
        confidence="certain" if is_same else "likely",
    )
