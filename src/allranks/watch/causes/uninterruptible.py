"""AR222 uninterruptible: a rank sleeps in the kernel and cannot be woken: a dead file server or disk."""

from __future__ import annotations

from allranks.watch.case import Case, stuck_at
from allranks.watch.evidence import Rank
from allranks.watch.verdict import Verdict

CODE, NAME = "AR222", "uninterruptible"
MIN_WAIT_S = 5.0
_NO_ANSWER = (
    "nfs",
    "rpc",
    "fuse",
    "lustre",
    "ceph",
    "cifs",
    "smb",
    "request_wait_answer",
    "percpu_rwsem",
    "freeze",
    "9p",
    "gfs",
)
"""What the kernel calls waits for a server, or for a frozen file system: no disk is slow there, one does not answer."""


def find(case: Case) -> Verdict | None:
    # A rank that writes is in state D now and then; one that stays there while others wait for 5 s is not.
    waited = case.waited_s([r.rank for r in case.stuck]) or 0.0
    asleep = [(r, case.activity(r)) for r in case.stuck if r.state == "D"]
    found = [
        (r, a)
        for r, a in asleep
        if waited >= (0.9 if _has_no_answer(r) else MIN_WAIT_S) and not case.is_early(r, a)
    ]
    if not found:
        return None
    first = found[0][0]
    nfs = any(word in first.wchan for word in _NO_ANSWER[:7])
    facts = [f"open for writing: {', '.join(first.open_files[:2])}" if first.open_files else ""]
    fix = "see `df` and the file server's state; the process cannot even be killed until the disk answers"
    return stuck_at(
        case,
        CODE,
        NAME,
        found,
        f"is in uninterruptible sleep (state D): {'a network file system' if nfs else 'a disk or file server'} does not answer",
        facts=facts,
        fix=fix,
    )


def _has_no_answer(rank: Rank) -> bool:
    return any(word in rank.wchan for word in _NO_ANSWER)
