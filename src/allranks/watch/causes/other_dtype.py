"""AR254 dtype-mismatch: ranks give tensors of different types to one collective."""

from __future__ import annotations

from allranks.watch.case import Case
from allranks.watch.causes.differs import find_difference
from allranks.watch.verdict import Verdict

CODE, NAME = "AR254", "dtype-mismatch"


def find(case: Case) -> Verdict | None:
    return find_difference(
        case,
        ("dtype",),
        CODE,
        NAME,
        "dtype mismatch: different types in one collective",
        "convert to one dtype on all ranks before the call",
    )
