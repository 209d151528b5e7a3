"""AR281 unused-parameters: parameters got no gradient, on one rank or on all, and DDP waits for them."""

from __future__ import annotations

import re

from allranks.watch.case import Case
from allranks.watch.evidence import Rank
from allranks.watch.verdict import Verdict, many, ranks_text

CODE, NAME = "AR281", "unused-parameters"

_TORCH_SAYS = re.compile(r"Expected to have finished reduction in the prior iteration")
_NAMES = re.compile(r"did not receive grad for rank \d+: (.+)")


def find(case: Case) -> Verdict | None:
    raised = [r for r in case.failed if r.failure and _TORCH_SAYS.search(r.failure.message)]
    waiting = [n for n, w in case.waits.items() if w.kind == "gradients"]
    silent = (
        [r for r in case.evidence.ranks if r.record and r.record.unused and r.exit is None] if waiting else []
    )
    guilty = raised or silent
    if not guilty or (case.roots and case.roots[0] not in raised):
        return None
    names = names_of(guilty[0])
    numbers = [r.rank for r in guilty]
    everywhere = len(guilty) == case.evidence.world_size
    on = "on all ranks" if everywhere else f"on {ranks_text(numbers)}"
    said = (
        f"unused parameters {on}: {names} did not receive a gradient"
        if names
        else f"unused parameters {on}: DDP waits for gradients that do not come"
    )
    fix = (
        "DDP(..., find_unused_parameters=True) without static_graph=True, "
        "or use all parameters in every forward on every rank (add 0 * aux(h).sum())"
    )
    if everywhere:
        fix += "\nif they were frozen after wrapping: freeze first (requires_grad_(False)), then DDP(...)"
    where = case.frames(raised[0].failure.frames) if raised and raised[0].failure else None
    return case.verdict(
        CODE,
        NAME,
        f"{case.who(guilty)}: {said}",
        guilty,
        where=where,
        facts=[
            "found in the step in which they got no gradient"
            if silent and not raised
            else "torch noticed it in the forward after that step",
            _frozen(case, guilty[0]),
            f"{case.who(case.victims)} {many([r.rank for r in case.victims], 'is a victim', 'are victims')}: "
            f"{'its' if len(case.victims) == 1 else 'their'} gradient all-reduce was never answered"
            if case.victims
            else "",
        ],
        fix=fix,
        can_go_on=False,
    )


def _frozen(case: Case, rank: Rank) -> str:
    if not rank.related:
        return ""
    *frozen, wrapped = rank.related
    return (
        f"frozen at {'; '.join(map(case.at, frozen))}, after the model was given to DDP at {case.at(wrapped)}"
    )


def names_of(rank: Rank) -> str:
    """The parameters' names: from torch's message, else from the record."""
    message = rank.failure.message if rank.failure else ""
    if found := _NAMES.search(message):
        return found[1].strip().rstrip(".")
    return rank.record.unused if rank.record else ""
