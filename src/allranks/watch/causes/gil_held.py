"""AR225 gil-held: a C extension holds Python's lock (GIL) in a rank."""

from __future__ import annotations

from allranks.watch.case import Case, stuck_at
from allranks.watch.verdict import Verdict

CODE, NAME = "AR225", "gil-held"


def find(case: Case) -> Verdict | None:
    found = case.doing("gil")
    if not found:
        return None
    return stuck_at(
        case,
        CODE,
        NAME,
        found,
        "is stuck in C code that holds Python's lock (GIL)",
        facts=["no thread of the process has run Python since, though it is not stopped"],
        fix="the C extension called at this line blocks or loops; update it, or call it in a process of its own",
    )
