"""AR747 validation-in-training: samples that are evaluated are also trained on."""

from __future__ import annotations

from allranks.watch.case import Case
from allranks.watch.noted import first_of_each, place, say, who
from allranks.watch.verdict import Verdict

CODE, NAME = "AR747", "validation-in-training"


def find(case: Case) -> Verdict | None:
    """Two subsets of one data set, one trained on and one evaluated, that overlap."""
    found = first_of_each(case, "leak")
    if found is None:
        return None
    one, ranks = found
    some = ", ".join(map(str, one["some"]))
    return say(
        case,
        CODE,
        NAME,
        f"{who(case, ranks)}: {one['both']} of {one['evaluate']} samples that are evaluated are in the training set, too",
        ranks,
        where=[place(one), place(one, "train_line")],
        facts=[f"of the same data set: indices {some}{' ...' if one['both'] > len(one['some']) else ''}"],
        fix="make both subsets from one split: train, valid = random_split(dataset, [...], generator=torch.Generator().manual_seed(0))",
    )
