"""AR255 root-mismatch: ranks name different roots in one collective."""

from __future__ import annotations

from allranks.watch.case import Case
from allranks.watch.causes.differs import find_difference
from allranks.watch.verdict import Verdict

CODE, NAME = "AR255", "root-mismatch"


def find(case: Case) -> Verdict | None:
    return find_difference(
        case,
        ("root",),
        CODE,
        NAME,
        "root mismatch: different roots in one collective",
        "name the same rank as src or dst on all ranks",
    )
