"""AR265 left-the-loop: a rank left its training loop, or skipped a step, and the others did not."""

from __future__ import annotations

from allranks.watch import meeting
from allranks.watch.case import Case
from allranks.watch.causes.finished import is_done
from allranks.watch.evidence import Rank
from allranks.watch.verdict import Verdict, many, ranks_text

CODE, NAME = "AR265", "left-the-loop"


def find(case: Case) -> Verdict | None:
    """Somebody waits for gradients of a step; others, with batches left, are past their loop: in another call, or at the end."""
    training = [n for n, w in case.waits.items() if w.kind == "gradients"]
    left = [r for r in case.evidence.ranks if r.rank not in training and _is_out(case, r)]
    if not training or not left or case.roots or len(training) + len(left) < len(case.evidence.ranks):
        return None
    gave_up = [r for r in left if _has_batches_left(r) or _skipped(case, r, training)]
    if not gave_up:
        return None
    numbers = [r.rank for r in gave_up]
    record = gave_up[0].record
    loader = record.loader if record else None
    steps = record.step if record else 0
    facts = [
        f"steps done: {', '.join(f'rank {r.rank}: {r.record.step}' for r in case.evidence.ranks[:8] if r.record)}"
    ]
    if loader is not None:
        facts.append(
            f"rank {numbers[0]} has drawn {loader.drawn} of {loader.length} batches of its pass {loader.number}"
        )
    what = "left its loop" if _has_batches_left(gave_up[0]) else "skipped a step (a batch without a backward)"
    places = [case.at(c.where) for r in gave_up[:1] if r.record and (c := r.record.inside) and c.where]
    places += [line for n in training[:1] if (r := case.evidence.rank(n)) for line in case.stands_at(r)[:1]]
    places += [case.at(loader.where)] if loader and loader.where else []
    return case.verdict(
        CODE,
        NAME,
        f"{case.who(gave_up)} {what} after {steps} steps (early stop?), and {ranks_text(training)} {many(training, 'trains', 'train')} on",
        gave_up,
        where=tuple(dict.fromkeys(places)),
        others=case.others(),
        facts=facts,
        fix="decide it on all ranks together: all_reduce the flag (MAX) before leaving the loop or skipping a step",
        can_go_on=False,
    )


def _is_out(case: Case, rank: Rank) -> bool:
    wait = case.waits.get(rank.rank)
    return is_done(rank) or (
        wait is not None and wait.call is not None and wait.call.op not in meeting.POINT_TO_POINT
    )


def _has_batches_left(rank: Rank) -> bool:
    loader = rank.record.loader if rank.record else None
    return (
        loader is not None and not loader.is_exhausted and 0 <= loader.drawn < loader.length and is_done(rank)
    )


def _skipped(case: Case, rank: Rank, training: list[int]) -> bool:
    """It has drawn as many batches as the others, but made fewer steps."""
    mine = rank.record
    other = case.evidence.rank(training[0])
    theirs = other.record if other else None
    if mine is None or theirs is None or mine.loader is None or theirs.loader is None:
        return False
    return (
        mine.loader.number == theirs.loader.number
        and mine.loader.drawn >= theirs.loader.drawn
        and mine.step <= theirs.step
        and (
            mine.loader.drawn - mine.step > theirs.loader.drawn - theirs.step - 1 and mine.loader.is_exhausted
        )
    )
