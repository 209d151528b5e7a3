"""AR256 reduce-op-mismatch: ranks reduce with different operations; the result is wrong in silence."""

from __future__ import annotations

from allranks.watch.case import Case
from allranks.watch.causes.differs import find_difference
from allranks.watch.verdict import Verdict

CODE, NAME = "AR256", "reduce-op-mismatch"


def find(case: Case) -> Verdict | None:
    return find_difference(
        case,
        ("reduce_op",),
        CODE,
        NAME,
        "reduce operation mismatch: the result is wrong on all ranks",
        "use the same op= on all ranks",
        can_go_on=True,
    )
