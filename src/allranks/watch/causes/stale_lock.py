"""AR232 stale-lock: ranks wait for a lock file that a dead process left behind."""

from __future__ import annotations

from allranks.watch.case import Case
from allranks.watch.verdict import Verdict, many, seconds

CODE, NAME = "AR232", "stale-lock"


def find(case: Case) -> Verdict | None:
    waiting = [
        r
        for r in case.evidence.ranks
        if r.is_alive and r.file_lock is not None and r.file_lock.owner_alive is not True
    ]
    if not waiting:
        return None
    lock = waiting[0].file_lock
    assert lock is not None
    if lock.owner_alive is None and lock.age_s < 30.0:
        return None
    owner = (
        f"its owner, process {lock.owner_pid}, is gone"
        if lock.owner_pid
        else "no process that can be seen here has it open"
    )
    numbers = [r.rank for r in waiting]
    return case.verdict(
        CODE,
        NAME,
        f"{case.who(waiting)} {many(numbers, 'waits', 'wait')} for a lock file that a dead process left behind: {lock.path}",
        waiting,
        facts=[f"{lock.path} is {seconds(lock.age_s)} old; {owner}"],
        fix=f"rm {lock.path}"
        if lock.owner_alive is False
        else f"another host or user may hold it: if nobody builds it now, rm {lock.path}",
        confidence="certain" if lock.owner_alive is False else "possible",
    )
