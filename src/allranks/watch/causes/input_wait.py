"""AR227 rank-waits-for-input: a rank waits for somebody to type."""

from __future__ import annotations

from allranks.watch.case import Case, stuck_at
from allranks.watch.verdict import Verdict

CODE, NAME = "AR227", "rank-waits-for-input"


def find(case: Case) -> Verdict | None:
    found = case.doing("input")
    if not found:
        return None
    return stuck_at(
        case,
        CODE,
        NAME,
        found,
        "waits for input",
        facts=["it reads standard input"],
        fix="take the value from the command line; no rank has a terminal of its own",
    )
