"""AR742 same-order: a shuffling sampler gives the same order in every epoch, since set_epoch is not called."""

from __future__ import annotations

from allranks.watch.case import Case
from allranks.watch.noted import Note, by_rank, place, say, who
from allranks.watch.verdict import Verdict

CODE, NAME = "AR742", "same-order"


def find(case: Case) -> Verdict | None:
    """Two training passes of one loader that begin alike, with a sampler that shuffles by its epoch."""
    guilty, passes = [], []
    for rank, own in sorted(by_rank(case, "pass").items()):
        facts = {n["loader"]: n for n in own if "dataset" in n}
        for later in own:
            known = facts.get(later["loader"])
            earlier = next(
                (n for n in own if (n["loader"], n["number"]) == (later["loader"], later["number"] - 1)), None
            )
            if known is not None and earlier is not None and _is_repeated(known, earlier, later):
                guilty.append(rank)
                passes.append((earlier, later, known))
                break
    if not guilty:
        return None
    before, after, known = passes[0]
    first = ", ".join(map(str, after["first"][:6]))
    return say(
        case,
        CODE,
        NAME,
        f"{who(case, guilty)}: the same order of samples in every epoch: set_epoch was not called ({known['sampler']})",
        guilty,
        where=[place(after)],
        facts=[
            f"passes {before['number']} and {after['number']} both begin with samples {first} ...",
            f"the sampler's epoch was {before['epoch']} and {after['epoch']}; it shuffles by its seed and that number",
        ],
        fix=f"call sampler.set_epoch(epoch) before the loop over the loader, on all ranks ({known['sampler']}.set_epoch)",
    )


def _is_repeated(known: Note, earlier: Note, later: Note) -> bool:
    """Whether a sampler that shuffles by its epoch began two training passes alike."""
    shuffles = known["shuffle"] and known["set_epoch"] and earlier["training"] and later["training"]
    return bool(
        shuffles and earlier["hash"] == later["hash"] and later["count"] >= 3 and len(set(later["first"])) > 2
    )
