"""AR236 rank-does-not-come: a rank does not come to the collective, and shows no reason."""

from __future__ import annotations

from allranks.watch.case import Case, stuck_at
from allranks.watch.verdict import Verdict

CODE, NAME = "AR236", "rank-does-not-come"


def find(case: Case) -> Verdict | None:
    found = case.doing("unknown", "idle")
    if not found:
        return None
    return stuck_at(
        case,
        CODE,
        NAME,
        found,
        "does not come",
        facts=["nothing known explains it"],
        fix="see its stacks in the run directory (diagnosis/)",
    )
