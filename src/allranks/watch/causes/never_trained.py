"""AR737 never-trained: parameters that require a gradient and never get one, on any rank."""

from __future__ import annotations

from allranks.watch.case import Case
from allranks.watch.noted import by_rank, say, who
from allranks.watch.verdict import Verdict

CODE, NAME = "AR737", "never-trained"


def find(case: Case) -> Verdict | None:
    """By what the ranks found at the steps they looked at; only what all of them say."""
    found = {rank: own[0] for rank, own in sorted(by_rank(case, "never").items())}
    if len(found) < case.evidence.world_size:
        return None
    names = sorted(set.intersection(*(set(n["names"]) for n in found.values())))
    if not names:
        return None
    one, ranks = next(iter(found.values())), sorted(found)
    more = max(0, one["count"] - len(one["names"]))
    shown = ", ".join(names[:6]) + (f" and {len(names) - 6 + more} more" if len(names) - 6 + more > 0 else "")
    return say(
        case,
        CODE,
        NAME,
        f"{who(case, ranks)}: {shown} never {'receives' if len(names) == 1 else 'receive'} a gradient, on any rank",
        ranks,
        where=[f"parameter {n}" for n in names[:5]],
        facts=[
            f"in none of {one['looks']} steps that were looked at, until step {one['step']}",
            "find_unused_parameters=True lets DDP pass over them in silence" if one["flag"] else "",
        ],
        fix="use them in forward, or freeze them before DDP is built: parameter.requires_grad_(False); then the flag is not needed either",
        step=one["step"],
    )
