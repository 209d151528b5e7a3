"""AR253 shape-mismatch: ranks give tensors of different sizes to one collective."""

from __future__ import annotations

from allranks.watch.case import Case
from allranks.watch.causes.differs import find_difference
from allranks.watch.verdict import Verdict

CODE, NAME = "AR253", "shape-mismatch"


def find(case: Case) -> Verdict | None:
    return find_difference(
        case,
        ("shape",),
        CODE,
        NAME,
        "shape mismatch: different sizes in one collective",
        "pad to the same size, gather the sizes first, or drop the last, smaller batch (drop_last=True)",
    )
