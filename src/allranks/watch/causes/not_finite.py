"""AR730 not-finite: the loss became nan or infinite on a rank; the averaged gradients then carry it to all ranks."""

from __future__ import annotations

from dataclasses import replace

from allranks.watch.case import Case
from allranks.watch.evidence import Rank
from allranks.watch.observed import NotFinite
from allranks.watch.verdict import Verdict, many, ranks_text

CODE, NAME = "AR730", "not-finite"


def find(case: Case) -> Verdict | None:
    """Only where the trigger saw such a loss: who was first, by step."""
    if case.evidence.trigger != "numbers":
        return None
    bad = [(r, r.record.not_finite) for r in case.evidence.ranks if r.record and r.record.not_finite]
    if not bad:
        return None
    step = min(found.step for _, found in bad)
    first = [(rank, found) for rank, found in bad if found.step == step]
    later = [rank.rank for rank, found in bad if found.step > step]
    ranks, found = [rank for rank, _ in first], first[0][1]
    are_all = len(ranks) == len(case.evidence.ranks) > 1
    when = f"first, at step {step}" if not are_all else f"at step {step}, on all ranks at once"
    others = (
        f"{ranks_text(later)} {many(later, 'has', 'have')} it since a later step: a consequence"
        if later
        else ""
    )
    where = tuple(dict.fromkeys(case.at(f.where) for _, f in first if f.where))
    verdict = case.verdict(
        CODE,
        NAME,
        f"{case.who(ranks)}: the loss became {_kinds(first)} {when}",
        ranks,
        where=(*where, *(case.at(place) for place in found.made)),
        since_s=found.age_s,
        others=others,
        facts=[
            "step 1 is the first; what backward was called on was looked at, before gradients were averaged",
            _why_all(step)
            if are_all
            else "averaging the gradients makes the parameters of all ranks not finite",
        ],
        fix="look at this rank's batch and at this line: a division by zero, log(0), sqrt(0), a too large learning rate, fp16\n"
        "torch.autograd.set_detect_anomaly(True) names the operation; start again from a checkpoint before this step",
    )
    return replace(verdict, step=step)


def _kinds(found: list[tuple[Rank, NotFinite]]) -> str:
    return " or ".join(sorted({bad.kind for _, bad in found}))


def _why_all(step: int) -> str:
    if step == 1:
        return "in the first step: the input, the initial parameters or the loss function"
    return f"all at once: the update of step {step - 1} made the parameters so; a gradient of any rank, or the learning rate"
