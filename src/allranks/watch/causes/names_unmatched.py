"""AR728 names-unmatched: a wrapped model's names are looked up in a dictionary that has the bare ones."""

from __future__ import annotations

from allranks.watch.case import Case
from allranks.watch.noted import first_of_each, place, say, who
from allranks.watch.verdict import Verdict

CODE, NAME = "AR728", "names-unmatched"


def find(case: Case) -> Verdict | None:
    """By what each rank looked up."""
    found = first_of_each(case, "unmatched")
    if found is None:
        return None
    one, ranks = found
    return say(
        case,
        CODE,
        NAME,
        f"{who(case, ranks)}: 0 of {one['names']} names matched: {one['what']} has {one['other']}, the loop looks for {one['first']}",
        ranks,
        where=[place(one)],
        facts=[
            f"{one['what']} holds {one['keys']} tensors of the parameters' shapes under the bare names; the wrapped model's have a prefix, "
            "so the test of the loop is never true",
            f"the loop ran {one['calls']} times: what it is to bring up to date (a moving average, say) stays as it was",
        ],
        fix="model.module.named_parameters() (of DDP), model._orig_mod.named_parameters() (of torch.compile): names without a prefix\n"
        "and an error for a name that is not there instead of a test; run.ema of allranks has the bare names",
    )
