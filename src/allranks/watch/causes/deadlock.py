"""AR223 lock-deadlock: a rank waits for a lock that is not given back."""

from __future__ import annotations

from dataclasses import replace

from allranks.watch.activity import waiting_threads
from allranks.watch.case import Case, stuck_at
from allranks.watch.evidence import Rank
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
    if partners:
        where += [f"{case.at(p)}   (thread {t})" for t, p in partners]
        words = "waits for a lock: deadlock of two threads that hold one lock each"
        fix = "take the locks in the same order in all threads, or with a timeout: lock.acquire(timeout=10)"
    else:
        words = "waits for a lock that nobody gives back"
        fix = "find who holds the lock: use `with lock:`, never acquire it twice in one thread, or pass a timeout"
    verdict = stuck_at(case, CODE, NAME, found, words, facts=_facts(rank), fix=fix)
    return replace(verdict, where=tuple(where))


def _partners(rank: Rank) -> list[tuple[str, Place]]:
    return [(stack.thread, place) for stack, place in waiting_threads(rank) if not stack.is_main]


def _facts(rank: Rank) -> list[str]:
    count = len([s for s in rank.stacks if s.frames])
    return [
        f"its main thread sleeps at a line that takes a lock, and uses no processor time ({count} Python threads)"
    ]
