"""AR733 never-averaged: a model in DDP is trained, and its gradients are never averaged."""

from __future__ import annotations

import re

from allranks.watch.case import Case
from allranks.watch.noted import by_rank, place, say, who
from allranks.watch.reading import source_of, with_code
from allranks.watch.verdict import Place, Verdict

CODE, NAME = "AR733", "never-averaged"
_HOW = {
    "module": "DDP's forward was never called: the module inside was",
    "no_sync": "every forward was under no_sync",
}
_FIX = {
    "module": "call the object that DistributedDataParallel returned, model(x), not model.module(x) or the model from before",
    "no_sync": "let the last micro-step of each update be outside of `with model.no_sync()`: forward and backward",
}
_NO_SYNC = re.compile(r"\bno_sync\(\)")


def find(case: Case) -> Verdict | None:
    """By what each rank noted of its own DDP; the parameters that differ, where all did at the same step."""
    found = {rank: own[0] for rank, own in sorted(by_rank(case, "never_averaged").items())}
    if len(found) < 2:
        return None
    one, ranks = next(iter(found.values())), sorted(found)
    line = next((p for n in found.values() if (p := place(n)) is not None), None)
    sums = {rank: dict(map(tuple, n["sums"])) for rank, n in found.items()}
    is_same_step = len({n["step"] for n in found.values()}) == 1
    names = [n for n, _ in one["sums"] if is_same_step and len({s.get(n) for s in sums.values()}) > 1]
    if is_same_step and one["sums"] and not names:
        return None  # whatever it is, the replicas are equal
    return say(
        case,
        CODE,
        NAME,
        f"{who(case, ranks)}: gradients were averaged 0 times in {one['step']} steps: {_HOW[one['why']]}",
        ranks,
        where=[
            line,
            *(_no_sync_lines(line) if one["why"] == "no_sync" else []),
            *(f"parameter {n}" for n in names[:3]),
        ],
        facts=[
            f"{names[0]} is the first parameter that differs between the ranks" if names else "",
            "each rank trains a model of its own on its part of the data",
        ],
        fix=_FIX[one["why"]],
        step=one["step"],
    )


def _no_sync_lines(near: Place | None) -> list[Place]:
    if near is None:
        return []
    lines = source_of(near.file).splitlines()
    return [with_code(Place(near.file, n)) for n, text in enumerate(lines, 1) if _NO_SYNC.search(text)][:2]
