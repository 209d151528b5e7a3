"""AR262 destroyed-while-others-wait: a rank destroyed the process group while others are in a collective."""

from __future__ import annotations

from allranks.watch.case import Case, is_on_its_way_out
from allranks.watch.evidence import Rank
from allranks.watch.verdict import Verdict, many

CODE, NAME = "AR262", "destroyed-while-others-wait"


def find(case: Case) -> Verdict | None:
    gone = [r for r in case.evidence.ranks if _has_destroyed(r)]
    if case.evidence.trigger not in ("exit", "lost") and any(is_on_its_way_out(r) for r in gone):
        return None  # in a moment its exception tells more
    waiting = case.waiting_for(gone)
    if not gone or not waiting or case.roots:
        return None
    call = next(
        (
            c
            for c in reversed(gone[0].record.calls if gone[0].record else ())
            if c.op == "destroy_process_group"
        ),
        None,
    )
    where = [case.at(call.where)] if call and call.where else list(case.stands_at(gone[0])[:1])
    where += [line for n in waiting[:1] if (r := case.evidence.rank(n)) for line in case.stands_at(r)[:1]]
    numbers = [r.rank for r in gone]
    return case.verdict(
        CODE,
        NAME,
        f"{case.who(gone)} {many(numbers, 'has', 'have')} destroyed the process group "
        f"while others still need it{case.waits_for(gone)}",
        gone,
        where=where,
        facts=[
            "steps done: "
            + ", ".join(f"rank {r.rank}: {r.record.step}" for r in case.evidence.ranks[:8] if r.record)
        ],
        fix="all ranks must make the same collectives before destroy_process_group(); give each the same number of steps",
        can_go_on=False,
    )


def _has_destroyed(rank: Rank) -> bool:
    record = rank.record
    if record is None or rank.exit is not None:
        return False
    return record.is_destroyed or (record.inside is not None and record.inside.op == "destroy_process_group")
