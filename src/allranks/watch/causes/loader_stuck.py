"""AR228 loader-stuck: a rank waits for its data loader, whose worker or data set does not answer."""

from __future__ import annotations

from dataclasses import replace

from allranks.watch.activity import Activity, worker_activity
from allranks.watch.case import Case, stuck_at
from allranks.watch.evidence import Rank, Worker
from allranks.watch.verdict import Verdict, seconds

CODE, NAME = "AR228", "loader-stuck"


def find(case: Case) -> Verdict | None:
    found = [(r, case.activity(r)) for r in case.stuck if r.record is not None and r.record.phase == "data"]
    found = [(r, a) for r, a in found if not _may_come(case, r, a)]
    if not found:
        return None
    rank, doing = found[0]
    worker = _guilty(rank)
    facts = _loader_facts(rank)
    if worker is None:
        if not rank.workers and doing.kind not in ("loader", "pipe", "unknown", "idle"):
            words = f"{doing.words} inside its data loader (in the data set, no workers)"
        else:
            words = "waits for its data loader, which gives no batch"
        return stuck_at(
            case,
            CODE,
            NAME,
            found,
            words,
            facts=facts,
            fix="look at the data set's line: does it wait or loop for this sample?",
        )
    act = worker_activity(worker)
    name = f"loader worker {worker.index}" if worker.index is not None else "a loader worker"
    item = f", reading index {worker.item}{_for(worker.item_s)}" if worker.item else ""
    facts.insert(0, f"{name} (pid {worker.pid}, state {worker.state}) {act.words}{item}")
    stack = next((s for s in worker.stacks if s.is_main), None)
    where = (*(case.frames(stack.frames) if stack else ()), *case.stands_at(rank)[:1])
    words = f"waits for its data loader: {name} is stuck{f' at index {worker.item}' if worker.item else ''} ({act.words})"
    fix = "look at this line of the data set for this index; DataLoader(timeout=60) turns such a wait into an error"
    return replace(stuck_at(case, CODE, NAME, found, words, facts=facts, fix=fix), where=where)


def _guilty(rank: Rank) -> Worker | None:
    """The worker that holds the loader up: one that is at a sample, longest first."""
    busy = [w for w in rank.workers if w.is_loader and w.item]
    if busy:
        return max(busy, key=lambda w: w.item_s)
    at_user = [w for w in rank.workers if w.is_loader and w.stacks and worker_activity(w).where is not None]
    return at_user[0] if at_user else None


def _may_come(case: Case, rank: Rank, doing: Activity) -> bool:
    """Whether its workers may still be coming up or at work, so that a batch can be expected."""
    workers = [w for w in rank.workers if w.is_loader or not w.stacks]
    waited = case.waited_s([rank.rank]) or 0.0
    loader = rank.record.loader if rank.record else None
    if case.evidence.trigger == "asked":
        return False
    if not workers and not (loader is not None and loader.num_workers):
        return case.is_early(rank, doing)
    if any(w.item_s > 1.0 and not worker_activity(w).is_busy for w in workers):
        return waited < 0.9
    is_coming_up = loader is None or loader.drawn == 0 or any(not w.is_loader for w in workers)
    if is_coming_up or any(worker_activity(w).is_busy or w.state == "R" for w in workers):
        return waited < 30.0
    return waited < 3.0


def _loader_facts(rank: Rank) -> list[str]:
    loader = rank.record.loader if rank.record else None
    if loader is None:
        return []
    of = f" of {loader.length}" if loader.length >= 0 else ""
    return [
        f"batch {loader.drawn + 1}{of} was asked for {seconds(loader.asked_s)} ago; {loader.num_workers} worker(s)"
    ]


def _for(value: float) -> str:
    return f" for {seconds(value)}" if value else ""
