"""AR725 own-entry-gradient: a loss over gathered features has its gradient through the rank's own entry only, and DDP divides it again."""

from __future__ import annotations

from allranks.watch.case import Case
from allranks.watch.noted import first_of_each, place, say, who
from allranks.watch.verdict import Verdict

CODE, NAME = "AR725", "own-entry-gradient"


def find(case: Case) -> Verdict | None:
    """By the graph of each rank's loss."""
    found = first_of_each(case, "own_entry")
    if found is None or len(found[1]) < 2:
        return None
    one, ranks = found
    return say(
        case,
        CODE,
        NAME,
        f"{who(case, ranks)}: the loss joins what all_gather gave, and only the own entry has a gradient: 1/{one['ranks']} of it is left",
        ranks,
        where=[place(one)],
        facts=[
            "if all ranks compute one loss, each has its own part of the gradient: DDP takes the mean of the parts, not their sum",
            f"that is 1/{one['ranks']} of one process's gradient; Adam hides it, weight decay and other terms of the loss do not",
        ],
        fix="torch.distributed.nn.functional.all_gather, which has a gradient",
        confidence="likely",
    )
