"""AR258 same-call-other-line: ranks meet in one collective from different lines: their values are mixed up in silence."""

from __future__ import annotations

from allranks.watch.case import Case
from allranks.watch.causes.differs import find_difference
from allranks.watch.verdict import Verdict

CODE, NAME = "AR258", "same-call-other-line"


def find(case: Case) -> Verdict | None:
    return find_difference(
        case,
        ("line",),
        CODE,
        NAME,
        "collectives out of order: the same kind of call from different lines, so values of different meaning are mixed",
        "make all ranks call them in the same order; the numbers since then are wrong",
        can_go_on=True,
    )
