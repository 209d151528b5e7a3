"""AR732 gradient-not-finite: a gradient became nan or infinite on a rank although its loss was a number."""

from __future__ import annotations

from allranks.watch.case import Case
from allranks.watch.noted import by_rank, say, who
from allranks.watch.verdict import Verdict, many, ranks_text

CODE, NAME = "AR732", "gradient-not-finite"


def find(case: Case) -> Verdict | None:
    """Who noted it first: seen before gradients were averaged, and stepped with by an optimizer."""
    found = {rank: own[0] for rank, own in sorted(by_rank(case, "gradient").items())}
    if not found:
        return None
    step = min(n["step"] for n in found.values())
    ranks = sorted(r for r, n in found.items() if n["step"] == step)
    one = found[ranks[0]]
    others = sorted(set(found) - set(ranks))
    highest, bad, sound = one["bad"][0], one["bad"][1:], one["sound"]
    when = f"at step {step}" if one["is_exact"] else f"at step {step} or some before"
    return say(
        case,
        CODE,
        NAME,
        f"{who(case, ranks)}: the gradient of {highest} became nan or infinite {when}; the loss was a number",
        ranks,
        where=[f"parameter {n}" for n in dict.fromkeys([highest, *bad])],
        others=f"{ranks_text(others)} {many(others, 'has', 'have')} it since a later step: a consequence"
        if others
        else "",
        facts=[
            f"{one['num_bad']} of {one['num']} gradients are not finite"
            + (
                f"; those of {', '.join(sound)} are: it began below them"
                if sound
                else ": it began in the loss, or in the last layer"
            ),
            "seen in this rank's own backward, before the average; the optimizer stepped with it"
            + ("" if one["is_exact"] else "; steps are quick here: ten a second are looked at"),
        ],
        fix="sqrt, norm, log and division have infinite gradients at 0: add a small eps inside; torch.autograd.set_detect_anomaly(True) "
        "names the operation\nskip such a step on all ranks: if not torch.isfinite(norm): optimizer.zero_grad()",
        step=step,
    )
