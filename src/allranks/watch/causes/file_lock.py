"""AR233 file-lock-held: a rank waits for a file lock that another process holds."""

from __future__ import annotations

from allranks.watch.case import Case, stuck_at
from allranks.watch.verdict import Verdict

CODE, NAME = "AR233", "file-lock-held"


def find(case: Case) -> Verdict | None:
    found = case.doing("file_lock", "build_lock")
    if not found:
        return None
    lock = found[0][0].file_lock
    facts = [
        f"{lock.path}, held by process {lock.owner_pid}"
        if lock and lock.owner_pid
        else f"{lock.path}"
        if lock
        else ""
    ]
    return stuck_at(
        case,
        CODE,
        NAME,
        found,
        "waits for a lock on a file that another process holds",
        facts=facts,
        fix="let only one rank take the lock, or see what its owner does",
    )
