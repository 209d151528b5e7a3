"""AR264 forward-on-some-ranks: only some ranks call the DDP model, whose forward broadcasts buffers."""

from __future__ import annotations

from allranks.watch.case import Case
from allranks.watch.causes.finished import guard_facts
from allranks.watch.evidence import Rank
from allranks.watch.verdict import Verdict, many, ranks_text

CODE, NAME = "AR264", "forward-on-some-ranks"


def find(case: Case) -> Verdict | None:
    if case.roots or case.stuck or len(case.waits) < 2:
        return None
    inside = [r for r in case.evidence.ranks if r.rank in case.waits and case.waits[r.rank].kind == "buffers"]
    more = _more_forwards(case)
    found = inside if 0 < len(inside) < len(case.waits) else more
    rest = [n for n in case.waits if n not in {r.rank for r in found}]
    if not found or not rest:
        return None
    numbers = [r.rank for r in found]
    facts = [
        "a DDP forward broadcasts the model's buffers (batch norm's running_mean, ...) from rank 0: all ranks must make it"
    ]
    facts += [f"forwards since the last step: {_forwards(case)}"] if more else []
    return case.verdict(
        CODE,
        NAME,
        f"collective mismatch: {case.who(found)} {many(numbers, 'calls', 'call')} the DDP model {'more often' if more else 'now'}, "
        f"and {ranks_text(rest)} {many(rest, 'does', 'do')} not: its forward broadcasts buffers",
        found,
        where=_places(case, found, rest),
        facts=[*facts, *guard_facts(case, numbers)],
        fix="on one rank alone call the inner module: model.module(x); or evaluate on all ranks",
        can_go_on=False,
    )


def _more_forwards(case: Case) -> list[Rank]:
    """Ranks that called the model more often in this step than the others, with all in the same step and none absent."""
    ranks = [r for r in case.evidence.ranks if r.rank in case.waits and r.record is not None]
    records = [r.record for r in ranks if r.record is not None]
    if any(w.call is not None for w in case.waits.values()) or len({x.step for x in records}) != 1:
        return []
    if len({x.group_seq for x in records}) < 2:
        return []
    few = min(x.micro_step for x in records)
    return [r for r in ranks if r.record is not None and r.record.micro_step > few]


def _forwards(case: Case) -> str:
    return ", ".join(f"rank {r.rank}: {r.record.micro_step}" for r in case.evidence.ranks[:8] if r.record)


def _places(case: Case, inside: list[Rank], rest: list[int]) -> tuple[str, ...]:
    others = [r for n in rest[:1] if (r := case.evidence.rank(n))]
    return tuple(line for r in (inside[0], *others) for line in case.stands_at(r)[:2])
