"""Do ranks stand apart since an error that only some of them met with was caught there? Said with the verdict on calls that do not meet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from allranks.watch.case import LOST_PEERS, Case
from allranks.watch.causes import (
    buffers,
    destroyed,
    failed_call_caught,
    finished,
    guarded,
    left_loop,
    not_coming,
    other_dtype,
    other_line,
    other_operation,
    other_root,
    other_shape,
    uneven,
)
from allranks.watch.evidence import Rank
from allranks.watch.observed import Caught
from allranks.watch.stacks import shown
from allranks.watch.verdict import Place, Verdict, ranks_text

EXPLAINED = frozenset(
    cause.CODE
    for cause in (
        buffers, destroyed, failed_call_caught, finished, guarded, left_loop, not_coming, other_dtype, other_line,
        other_operation, other_root, other_shape, uneven,
    )
)  # fmt: skip
"""The verdicts on ranks that are not at the same call, which an error that only one of them met with may explain."""
MOST_RANKS = 3
FIX = "let the error end the job, or let all ranks skip the batch together: all_reduce a flag (MAX) after the try\n"


def explained(case: Case, verdict: Verdict | None) -> Verdict | None:
    """The verdict, with the errors that some ranks met with and others did not."""
    if verdict is None or verdict.code not in EXPLAINED:
        return verdict
    alone = {r.rank: errors for r in case.evidence.ranks if (errors := _alone(case, r))}
    if not alone:
        return _with_handlers(case, verdict)
    fix = FIX + verdict.fix if verdict.code != failed_call_caught.CODE else verdict.fix
    facts = [_said(case, n, errors) for n, errors in list(alone.items())[:MOST_RANKS]]
    takers = [case.at(e.handler) for errors in alone.values() for e in errors[:1] if e.handler is not None]
    return replace(
        verdict,
        where=tuple(dict.fromkeys((*takers[:1], *verdict.where))),
        facts=(*facts, *verdict.facts),
        fix=fix,
    )


def _alone(case: Case, rank: Rank) -> tuple[Caught, ...]:
    """Errors of a rank that went on, which another rank did not meet with in the same step."""
    record = rank.record
    if (
        record is None
        or record.exception is not None
        or rank.is_cleaning_up
        or (rank.exit is not None and rank.exit.failed)
    ):
        return ()
    others = [{e.identity for e in r.caught} for r in case.evidence.ranks if r.rank != rank.rank]
    return tuple(
        e
        for e in rank.caught
        if not LOST_PEERS.search(e.message) and any(e.identity not in theirs for theirs in others)
    )


def _said(case: Case, number: int, errors: Sequence[Caught]) -> str:
    first, more = errors[0], len(errors) - 1
    text = f"rank {number} went on after {_article(first.kinds[0])} in {first.what}, step {first.step + 1}"
    text += f" ({first.message})" if first.message else ""
    text += f", raised at {_line(case, first.where)}" if first.where is not None else ""
    text += f", caught at {_line(case, first.handler)}" if first.handler is not None else ""
    return text + (f"; and after {more} more" if more else "")


def _line(case: Case, place: Place) -> str:
    found = shown(place, case.evidence.cwd)
    return found.short() if found is not None else ""


def _article(kind: str) -> str:
    return f"{'an' if kind[:1] in 'AEIOU' else 'a'} {kind}"


def _with_handlers(case: Case, verdict: Verdict) -> Verdict:
    """An error of the user's own code is not seen; but the line that a rank did not come to may stand where one is kept quiet."""
    if verdict.code not in (guarded.CODE, left_loop.CODE):
        return verdict
    came = [r for r in case.evidence.ranks if (r.rank in verdict.ranks) == (verdict.code == guarded.CODE)]
    theirs = {h for r in case.evidence.ranks if r not in came for h in r.handlers}
    quiet = next(((r, h) for r in came for h in r.handlers if h not in theirs), None)
    if quiet is None:
        return verdict
    rank, handler = quiet
    rest = ranks_text([r.rank for r in case.evidence.ranks if r not in came])
    said = f"rank {rank.rank} is in a try that goes on after an error, which {rest} may have met with: {case.at(handler)}"
    return replace(verdict, facts=(*verdict.facts, said))
