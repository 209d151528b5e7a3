"""AR724 left-over-gradients: the last micro-steps of each pass are thrown away before an optimizer step used them."""

from __future__ import annotations

from allranks.watch.case import Case
from allranks.watch.noted import first_of_each, place, say, who
from allranks.watch.verdict import Verdict

CODE, NAME = "AR724", "left-over-gradients"


def find(case: Case) -> Verdict | None:
    """By what each rank counted between two calls of zero_grad."""
    found = first_of_each(case, "left_over")
    if found is None:
        return None
    one, ranks = found
    lost, window, drawn = one["micro_steps"], one["window"], one["drawn"]
    of = f"{lost} of {drawn}" if drawn > lost else f"the last {lost}"
    steps = f"{drawn // window} optimizer steps instead of {drawn // window + 1}" if drawn > lost else ""
    return say(
        case,
        CODE,
        NAME,
        f"{who(case, ranks)}: {of} micro-steps of a pass have no effect: zero_grad throws their gradients away",
        ranks,
        where=[place(one), place(one, "loop")],
        facts=[
            f"{window} micro-steps make one optimizer step; {lost} are left over at the end of the pass{', ' if steps else ''}{steps}",
            "the same samples are lost in every pass unless their order changes",
        ],
        fix="if (i + 1) % k == 0 or i + 1 == len(loader): optimizer.step()\n"
        "or drop the rest on purpose: drop_last=True and a length that divides by k",
        step=one["step"],
    )
