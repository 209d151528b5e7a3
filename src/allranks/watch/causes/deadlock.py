"""AR223 lock-deadlock: a rank waits for a lock that is not given back."""

from __future__ import annotations

from dataclasses import replace

from allranks.watch.activity import waiting_threads
from allranks.watch.case import Case, stuck_at
from allranks.watch.evidence import Rank
from allranks.watch.stacks import is_inside, main_stack
from allranks.watch.verdict import Place, Verdict

CODE, NAME = "AR223", "lock-deadlock"


def find(case: Case) -> Verdict | None:
    found = case.doing("lock")
    if not found and case.evidence.trigger == "silence":
        found = [
            (r, a)
            for r in case.evidence.ranks
            if r.is_alive and (a := case.activity(r)).kind == "lock" and _partners(r)
        ]
    if not found:
        return None
    rank = found[0][0]
    partners = _partners(rank)
    where = list(case.stands_at(rank))
    where += [f"{case.at(p)}   (thread {t})" for t, p in partners]
    if awaited := _awaited(rank):
        words, fix = awaited
    elif partners:
        words = "waits for a lock: deadlock of two threads that hold one lock each"
        fix = "take the locks in the same order in all threads, or with a timeout: lock.acquire(timeout=10)"
    else:
        words = "waits for a lock that nobody gives back"
        fix = "find who holds the lock: use `with lock:`, never acquire it twice in one thread, or pass a timeout"
    verdict = stuck_at(case, CODE, NAME, found, words, facts=_facts(rank), fix=fix)
    return replace(verdict, where=tuple(where))


def _awaited(rank: Rank) -> tuple[str, str] | None:
    """What is said, and what to do, where it is no lock of the script's that is waited for."""
    stack = main_stack(rank.stacks)
    top = stack.frames[:4] if stack else ()
    if is_inside(top, "/queue.py", "get", "put"):
        words = (
            "waits for a queue that no thread fills"
            if is_inside(top, "/queue.py", "get")
            else "waits for a queue that is full"
        )
        return (
            words,
            "see what the thread at the other end does (its errors are in the rank's log), or get(timeout=60)",
        )
    if is_inside(top, "/threading.py", "join", "_wait_for_tstate_lock"):
        return (
            "waits for a thread that does not end",
            "see what that thread does (its stack is in diagnosis/), or join(timeout=60)",
        )
    if is_inside(top, "/concurrent/futures/_base.py", "result"):
        return (
            "waits for a result that does not come",
            "see what the thread or process of the pool does, or result(timeout=60)",
        )
    return None


def _partners(rank: Rank) -> list[tuple[str, Place]]:
    return [(stack.thread, place) for stack, place in waiting_threads(rank) if not stack.is_main]


def _facts(rank: Rank) -> list[str]:
    count = len([s for s in rank.stacks if s.frames])
    what = "waits for another thread" if _awaited(rank) else "takes a lock"
    return [
        f"its main thread sleeps at a line that {what}, and uses no processor time ({count} Python threads)"
    ]
