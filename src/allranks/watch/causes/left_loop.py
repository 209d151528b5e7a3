"""AR265 left-the-loop: a rank left its training loop, or skipped a step, and the others did not."""

from __future__ import annotations

from allranks.watch import meeting
from allranks.watch.case import Case
from allranks.watch.causes.finished import is_done
from allranks.watch.causes.guarded import value_facts
from allranks.watch.causes.killed import signal_name
from allranks.watch.evidence import Rank
from allranks.watch.noted import notes
from allranks.watch.observed import Loop
from allranks.watch.reading import ways_out
from allranks.watch.stacks import user_frames
from allranks.watch.verdict import Place, Verdict, many, ranks_text

CODE, NAME = "AR265", "left-the-loop"


def find(case: Case) -> Verdict | None:
    """By what their loaders say; where there is none, by the lines at which they stand."""
    return _by_batches(case) or _by_lines(case)


def _by_batches(case: Case) -> Verdict | None:
    """Somebody waits for gradients of a step; others, with batches left, are past their loop: in another call, or at the end."""
    training = [n for n, w in case.waits.items() if w.kind == "gradients"]
    left = [r for r in case.evidence.ranks if r.rank not in training and _is_out(case, r)]
    if not training or not left or case.roots or len(training) + len(left) < len(case.evidence.ranks):
        return None
    gave_up = [
        r
        for r in left
        if _has_batches_left(r) or _broke_off(case, r, training) or _skipped(case, r, training)
    ]
    if not gave_up:
        return None
    broke_off = _broke_off(case, gave_up[0], training)
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
    facts += [f"{broke_off}; the ranks have been in different passes since"] if broke_off else []
    facts += [f"rank {r.rank} had got {_signals(r)}" for r in gave_up if _signals(r)]
    facts += _ways_out(case, training)
    what = "left its loop" if _has_batches_left(gave_up[0]) else "skipped a step (a batch without a backward)"
    if broke_off:
        what = "left its loop in the middle of a pass, and came to its end"
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


def _by_lines(case: Case) -> Verdict | None:
    """Somebody waits for gradients inside a loop; others are in a call after it, which no condition on the rank guards."""
    training = [r for n, w in case.waits.items() if w.kind == "gradients" and (r := case.evidence.rank(n))]
    left = [r for r in case.evidence.ranks if r not in training]
    if not training or not left or case.roots or any(r.guard is not None for r in left):
        return None
    loops = [_loop_left(training[0], r) for r in left]
    if any(loop is None or not _is_out(case, r) for loop, r in zip(loops, left, strict=True)):
        return None
    numbers = [r.rank for r in training]
    steps = left[0].record.step if left[0].record else 0
    after = f" after {steps} steps" if steps else ""
    places = [
        *case.stands_at(left[0])[:1],
        *case.stands_at(training[0])[:1],
        *(case.at(x.at) for x in loops[:1] if x),
    ]
    return case.verdict(
        CODE,
        NAME,
        f"{case.who(left)} left {many([r.rank for r in left], 'its', 'their')} loop{after} (fewer batches? early stop?), "
        f"and {ranks_text(numbers)} {many(numbers, 'trains', 'train')} on",
        left,
        where=places,
        others=case.others([r.rank for r in left]),
        facts=[
            f"the first line above is after the loop that {ranks_text(numbers)} {many(numbers, 'is', 'are')} in",
            *_ways_out(case, numbers),
        ],
        fix="give all ranks the same number of batches (or train inside `with model.join():`); decide an early stop on all ranks together",
        can_go_on=False,
    )


def _ways_out(case: Case, training: list[int]) -> list[str]:
    """Where the loop can be left, of which the others are inside."""
    loops = [loop for n in training[:1] if (r := case.evidence.rank(n)) for loop in r.loops]
    places = dict.fromkeys(p for loop in loops for p in ways_out(loop))
    found = [f"the loop is left at {case.at(place)}" for place in list(places)[:2]]
    return [*found, *value_facts(case)]


def _loop_left(inside: Rank, after: Rank) -> Loop | None:
    """The loop that `inside` is in and `after` is past, if they came to it in the same way and it is in no other loop."""
    loops = {(x.at.file, x.line): x for x in inside.loops}
    for one, two in zip(reversed(_own_frames(inside)), reversed(_own_frames(after)), strict=False):
        loop = loops.get((one.file, one.line))
        if (one.file, one.function) != (two.file, two.function):
            return None
        if one.line != two.line:
            return loop if loop is not None and two.line > loop.last else None
        if loop is not None:
            return None
    return None


def _own_frames(rank: Rank) -> tuple[Place, ...]:
    stack = next((s for s in rank.stacks if s.is_main), None)
    return user_frames(stack.frames) if stack is not None else ()


def _signals(rank: Rank) -> str:
    """'signal 15 (SIGTERM) at step 10', of those that its own handlers took."""
    return ", ".join(
        f"signal {n['number']} ({signal_name(int(n['number']))}) at step {n.get('step')}, batch {n.get('batch')}"
        for n in notes(rank, "signal")[-2:]
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


def _broke_off(case: Case, rank: Rank, training: list[int]) -> str:
    """'rank 1 drew 21 of 60 batches of its pass 2, rank 0 60': of the pass before; "" if it left none out, or the others did, too."""
    other = case.evidence.rank(training[0])
    mine = rank.record.loader_before if rank.record else None
    theirs = other.record.loader_before if other and other.record else None
    if mine is None or theirs is None or mine.is_exhausted or not 0 <= mine.drawn < mine.length:
        return ""
    if (mine.number, mine.where, mine.length) != (
        theirs.number,
        theirs.where,
        theirs.length,
    ) or theirs.drawn <= mine.drawn:
        return ""
    drawn = f"{mine.drawn} of {mine.length} batches of its pass {mine.number}"
    return f"rank {rank.rank} drew {drawn}, rank {training[0]} {theirs.drawn}"


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
