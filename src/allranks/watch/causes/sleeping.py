"""AR226 rank-sleeps: a rank sleeps while others wait for it."""

from __future__ import annotations

from allranks.watch.case import Case, stuck_at
from allranks.watch.verdict import Verdict

CODE, NAME = "AR226", "rank-sleeps"


def find(case: Case) -> Verdict | None:
    found = case.doing("sleep")
    if not found:
        return None
    return stuck_at(
        case,
        CODE,
        NAME,
        found,
        "sleeps",
        facts=["its main thread is in a sleep call"],
        fix="remove the sleep, or let all ranks wait together",
    )
