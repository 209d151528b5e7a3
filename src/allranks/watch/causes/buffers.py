"""AR264 forward-on-some-ranks: only some ranks call the DDP model, whose forward broadcasts buffers."""

from __future__ import annotations

from allranks.watch.case import Case
from allranks.watch.causes.finished import guard_facts
from allranks.watch.evidence import Rank
from allranks.watch.verdict import Verdict, many, ranks_text

CODE, NAME = "AR264", "forward-on-some-ranks"


def find(case: Case) -> Verdict | None:
    inside = [r for r in case.evidence.ranks if r.rank in case.waits and case.waits[r.rank].kind == "buffers"]
    rest = [n for n in case.waits if n not in {r.rank for r in inside}]
    if not inside or not rest or case.roots or case.stuck:
        return None
    if len(inside) > len(rest):
        return None
    numbers = [r.rank for r in inside]
    buffers = next((r.record.model.parameters for r in inside if r.record and r.record.model), ())
    named = [b.split(" ")[0] for b in buffers if "buffer" in b][:3]
    return case.verdict(
        CODE,
        NAME,
        f"collective mismatch: {case.who(inside)} {many(numbers, 'calls', 'call')} the DDP model, whose forward broadcasts buffers, and {ranks_text(rest)} {many(rest, 'does', 'do')} not",
        inside,
        where=_places(case, inside, rest),
        facts=[
            f"buffers broadcast: {', '.join(named)}, ..."
            if named
            else "a DDP forward broadcasts the model's buffers from rank 0",
            *guard_facts(case, numbers),
        ],
        fix="on one rank alone call the inner module: model.module(x); or evaluate on all ranks",
        can_go_on=False,
    )


def _places(case: Case, inside: list[Rank], rest: list[int]) -> tuple[str, ...]:
    others = [r for n in rest[:1] if (r := case.evidence.rank(n))]
    return tuple(line for r in (inside[0], *others) for line in case.stands_at(r)[:2])
