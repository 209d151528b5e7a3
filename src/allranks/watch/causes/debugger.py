"""AR220 rank-in-debugger: a rank stands at a breakpoint."""

from __future__ import annotations

from allranks.watch.case import Case, stuck_at
from allranks.watch.evidence import Rank
from allranks.watch.verdict import Verdict

CODE, NAME = "AR220", "rank-in-debugger"


def find(case: Case) -> Verdict | None:
    found = [(r, a) for r in _candidates(case) if (a := case.activity(r)).kind == "debugger"]
    if not found:
        return None
    return stuck_at(
        case,
        CODE,
        NAME,
        found,
        "stands at a breakpoint in a debugger",
        facts=["pdb is on its stack"],
        fix="remove breakpoint() / set_trace(), or let it stop on all ranks",
    )


def _candidates(case: Case) -> tuple[Rank, ...]:
    return case.stuck or (case.evidence.ranks if case.evidence.trigger in ("silence", "asked") else ())
