"""AR280 models-differ: the ranks gave different models to DDP."""

from __future__ import annotations

import re
from collections import Counter

from allranks.watch.case import Case
from allranks.watch.evidence import Rank
from allranks.watch.verdict import Verdict

CODE, NAME = "AR280", "models-differ"

TORCH_SAYS = re.compile(
    r"DDP expects same model across all ranks|appears not to match (sizes|strides) of the same param|inconsistent \d+ params"
)


def find(case: Case) -> Verdict | None:
    models = {r.rank: r.record.model for r in case.evidence.ranks if r.record and r.record.model}
    in_build = any(w.kind == "build" for w in case.waits.values()) or any(
        r.record and r.record.phase == "build" for r in case.failed
    )
    said = [r for r in case.failed if r.failure and TORCH_SAYS.search(r.failure.message)]
    same_number = len({m.number for m in models.values()}) == 1
    if (
        len(models) < 2
        or not same_number
        or not (said or in_build or _is_to_fail(case))
        or len({m.hash for m in models.values()}) < 2
    ):
        return None
    odd = _odd(case)
    difference = first_difference(case)
    facts = [
        difference,
        f"parameters: {', '.join(f'rank {n}: {m.num_parameters}' for n, m in sorted(models.items())[:8])}",
    ]
    facts += [said[0].failure.message.split("\n")[0][:160]] if said and said[0].failure else []
    return case.verdict(
        CODE,
        NAME,
        f"the models differ: {case.who(odd)} gave DDP another model than the others{f' ({difference})' if difference else ''}",
        odd,
        where=_places(case, odd),
        facts=facts,
        fix="build the same model on all ranks: same sizes, same layers, same requires_grad; nothing that depends on the rank or its data",
        can_go_on=False,
    )


def _is_to_fail(case: Case) -> bool:
    """Ranks construct DDP on the only group there is, and what it will compare is not the same: known before it has compared it."""
    building = [
        r.record.model.parameters
        for r in case.evidence.ranks
        if r.is_alive
        and r.record is not None
        and r.record.phase == "build"
        and r.record.num_groups == 0
        and r.record.model is not None
        and r.record.model.parameters
    ]
    trained = {
        tuple(p.split(" ", 1)[1] for p in parameters if p.endswith(" trained")) for parameters in building
    }
    return len(trained) > 1


def first_difference(case: Case) -> str:
    """The first parameter in which two ranks' models differ, by name."""
    lists = {
        r.rank: r.record.model.parameters
        for r in case.evidence.ranks
        if r.record and r.record.model and r.record.model.parameters
    }
    if len(lists) < 2:
        return ""
    (a, first), *rest = sorted(lists.items())
    for b, other in rest:
        for one, two in zip(first, other, strict=False):
            if one != two:
                return f"rank {a}: {one}, rank {b}: {two}"
        if len(first) != len(other):
            longer, n = (first, a) if len(first) > len(other) else (other, b)
            return f"only rank {n} has {longer[min(len(first), len(other))]}"
    return ""


def _odd(case: Case) -> list[Rank]:
    have = [r for r in case.evidence.ranks if r.record and r.record.model]
    counts = Counter(r.record.model.hash for r in have if r.record and r.record.model)
    most = counts.most_common(1)[0]
    if list(counts.values()).count(most[1]) > 1:
        return [r for r in have if r.rank != 0][:1] if len(have) == 2 else have
    return [r for r in have if r.record and r.record.model and r.record.model.hash != most[0]]


def _places(case: Case, odd: list[Rank]) -> tuple[str, ...]:
    for rank in odd:
        if rank.failure:
            return case.frames(rank.failure.frames)
    return case.stands_at(odd[0]) if odd else ()
