"""AR234 rank-waits-for-program: a rank waits for a program that it started."""

from __future__ import annotations

from allranks.watch.case import Case, stuck_at
from allranks.watch.verdict import Verdict

CODE, NAME = "AR234", "rank-waits-for-program"


def find(case: Case) -> Verdict | None:
    found = case.doing("subprocess", "pipe")
    if not found:
        return None
    return stuck_at(
        case,
        CODE,
        NAME,
        found,
        "waits for another process",
        facts=["its main thread waits for a child process or a pipe"],
        fix="give the call a timeout (subprocess.run(..., timeout=60)), and see what the program waits for",
    )
