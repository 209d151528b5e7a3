"""AR252 collective-mismatch: ranks are in different collectives at the same time."""

from __future__ import annotations

from allranks.watch.case import Case
from allranks.watch.causes.differs import find_difference
from allranks.watch.verdict import Verdict

CODE, NAME = "AR252", "collective-mismatch"


def find(case: Case) -> Verdict | None:
    return find_difference(
        case,
        ("op",),
        CODE,
        NAME,
        "collective mismatch (different operations, or another order)",
        "make all ranks call the same collectives in the same order; move them out of branches that depend on the rank or on data",
    )
