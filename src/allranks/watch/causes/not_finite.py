"""AR730 not-finite: the loss became nan or infinite on a rank; the averaged gradients then carry it to all ranks."""

from __future__ import annotations

from dataclasses import replace

from allranks.watch.case import Case
from allranks.watch.evidence import Rank
from allranks.watch.noted import Note, notes
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
    first = [(rank, found) for rank, found in bad if not any(other.step <= _sound(found) for _, other in bad)]
    later = [rank.rank for rank, found in bad if (rank, found) not in first]
    ranks, found = [rank for rank, _ in first], min((f for _, f in first), key=lambda f: f.step)
    step = found.step
    is_exact = all(f.is_exact and f.step == step for _, f in first)
    are_all = is_exact and len(ranks) == len(case.evidence.ranks) > 1
    when = _when(found, are_all=are_all, is_exact=is_exact, are_many=len(ranks) > 1)
    others = (
        f"{ranks_text(later)} {many(later, 'has', 'have')} it since a later step: a consequence"
        if later
        else ""
    )
    told = origin_of(first)
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
            *told,
            "" if is_exact else "steps are quick here: the loss of some is looked at, every 100 ms or so",
            "steps are counted from 1; what backward was called on was looked at, before gradients were averaged",
            _why_all(step)
            if are_all
            else "averaging the gradients makes the parameters of all ranks not finite",
        ],
        fix="look at this rank's batch and at this line: a division by zero, log(0), sqrt(0), a too large learning rate, fp16\n"
        "torch.autograd.set_detect_anomaly(True) names the operation; start again from a checkpoint before this step",
    )
    return replace(verdict, step=step)


def origin_of(first: list[tuple[Rank, NotFinite]]) -> list[str]:
    """Where it began, and in which samples, as far as the rank itself could see."""
    for rank, found in first:
        note = next((n for n in notes(rank, "not_finite") if n["step"] == found.step), None)
        if note is not None:
            return [text for text in (_origin(note), _samples(note)) if text]
    return []


def _origin(note: Note) -> str:
    place, operation, after = note.get("place"), note.get("operation"), note.get("after")
    if place == "input":
        rows = ", ".join(map(str, note.get("rows", ())))
        return (
            f"the input of the model was not finite already: sample {rows} of {note.get('of')} in the batch"
        )
    if place == "parameter":
        return f"parameter {note['name']} was not finite already ({note['count']} are): a step before made them so"
    made = f"{operation} made it" if operation else ""
    made += f", after {after}" if made and after else ""
    if place == "forward":
        return f"the model's output was not finite{': ' + made if made else ''}"
    return (
        f"the model's output was finite, the loss function made it{': ' + made if made else ''}"
        if place
        else made
    )


def _samples(note: Note) -> str:
    samples = note.get("samples") or []
    some = ", ".join(map(str, samples[:8])) + (" ..." if len(samples) > 8 else "")
    return (
        f"data set index{'' if len(samples) == 1 else 'es'} of {'that sample' if note.get('is_row') else 'the batch'}: {some}"
        if some
        else ""
    )


def _sound(found: NotFinite) -> int:
    return found.step - 1 if found.sound < 0 else found.sound


def _when(found: NotFinite, *, are_all: bool, is_exact: bool, are_many: bool) -> str:
    if are_all:
        return f"at step {found.step}, on all ranks at once"
    if is_exact:
        return f"first, at step {found.step}"
    when = f"between step {_sound(found) + 1} and {found.step}"
    return f"{when}; which of them was first is not known" if are_many else f"first, {when}"


def _kinds(found: list[tuple[Rank, NotFinite]]) -> str:
    return " or ".join(sorted({bad.kind for _, bad in found}))


def _why_all(step: int) -> str:
    if step == 1:
        return "in the first step: the input, the initial parameters or the loss function"
    return f"all at once: the update of step {step - 1} made the parameters so; a gradient of any rank, or the learning rate"
