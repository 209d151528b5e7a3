"""AR723 floored-mean: an integer sum over the ranks is divided in place, and the mean is cut off."""

from __future__ import annotations

from allranks.watch.case import Case
from allranks.watch.noted import first_of_each, place, say, who
from allranks.watch.verdict import Verdict

CODE, NAME = "AR723", "floored-mean"


def find(case: Case) -> Verdict | None:
    """By what was added up and what was in the tensor afterwards."""
    found = first_of_each(case, "floored")
    if found is None:
        return None
    one, ranks = found
    k = next((k for k, value in enumerate(one["sums"]) if value % one["ranks"]), 0)
    exact, used = one["sums"][k] / one["ranks"], one["used"][k]
    return say(
        case,
        CODE,
        NAME,
        f"{who(case, ranks)}: a mean over the ranks is cut off: {used} for {exact:g}, in a tensor of {one['dtype']}",
        ranks,
        where=[place(one)],
        facts=[
            f"all ranks together have {one['sums'][k]}; divided by {one['ranks']} in a tensor of whole numbers, the rest is lost",
            "what is divided by it afterwards is too large" if used < exact else "",
        ],
        fix="add up in floating point, tensor.double(), or keep the sums and divide them by each other",
        confidence="likely",
    )
