"""AR722 aliased-gather: all_gather writes all ranks' values into one tensor, and only the last one's stay."""

from __future__ import annotations

from allranks.watch.case import Case
from allranks.watch.noted import first_of_each, place, say, who
from allranks.watch.verdict import Verdict

CODE, NAME = "AR722", "aliased-gather"


def find(case: Case) -> Verdict | None:
    """By what each rank saw of its own list."""
    found = first_of_each(case, "aliased")
    if found is None:
        return None
    one, ranks = found
    return say(
        case,
        CODE,
        NAME,
        f"{who(case, ranks)}: all_gather writes into a list that holds one tensor {one['count']} times: entries 0 and 1 are the same",
        ranks,
        where=[place(one)],
        facts=[
            f"each rank's values (shape {one['shape']}) are written over those of the rank before: all entries show the last one's",
        ],
        fix="[torch.empty_like(x) for _ in range(world_size)], not [torch.empty_like(x)] * world_size",
    )
