"""AR230 rank-writes: a rank is busy writing a file or checkpoint."""

from __future__ import annotations

from allranks.watch.case import Case, stuck_at
from allranks.watch.verdict import Verdict

CODE, NAME = "AR230", "rank-writes"


def find(case: Case) -> Verdict | None:
    found = case.doing("write")
    if not found:
        return None
    return stuck_at(
        case,
        CODE,
        NAME,
        found,
        "is writing a file (a slow or full disk?)",
        facts=["its main thread is in a write"],
        fix="see the disk with df -h; write to a local disk, or in the background",
    )
