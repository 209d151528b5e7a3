"""AR286 ddp-build-met-another-call: DDP's construction on one rank was paired with another rank's collective."""

from __future__ import annotations

from allranks.watch.apart import is_bound_for_build
from allranks.watch.case import Case
from allranks.watch.causes.models_differ import TORCH_SAYS
from allranks.watch.evidence import Rank
from allranks.watch.verdict import Verdict, ranks_text

CODE, NAME = "AR286", "ddp-build-met-another-call"


def find(case: Case) -> Verdict | None:
    said = [r for r in case.failed if r.failure and TORCH_SAYS.search(r.failure.message)]
    building = said or [
        r for r in case.evidence.ranks if r.rank in case.waits and case.waits[r.rank].kind == "build"
    ]
    building = building or _bound_for_build(case)
    other = [
        r
        for r in case.evidence.ranks
        if r not in building and (w := case.waits.get(r.rank)) is not None and w.call is not None
    ]
    if not building or not other:
        return None
    call = case.waits[other[0].rank].call
    assert call is not None
    lines = [f"{case.at(call.where)}   ({ranks_text([r.rank for r in other])})"] if call.where else []
    lines += [
        f"{line}   ({ranks_text([r.rank for r in building])})" for line in case.stands_at(building[0])[:1]
    ]
    if building[0].failure:
        lines += [
            f"{x}   ({ranks_text([building[0].rank])})" for x in case.frames(building[0].failure.frames)[:1]
        ]
    facts = (
        [f"{building[0].failure.message.splitlines()[0][:160]}: a consequence, the models need not differ"]
        if building[0].failure
        else []
    )
    return case.verdict(
        CODE,
        NAME,
        f"collective mismatch: {case.who(other)} is in {call.op} while "
        f"{ranks_text([r.rank for r in building])} constructs DDP, which is a collective too",
        other,
        where=tuple(dict.fromkeys(lines)),
        facts=facts,
        fix="let all ranks come to both in the same order: the call first, then DDP(...), on every rank",
        can_go_on=False,
    )


def _bound_for_build(case: Case) -> list[Rank]:
    """Ranks at the beginning of DDP's construction, before its first collective, which is to be the one that others are already in."""
    calls = [
        (w.seq - 1, r.record.model.number if r.record.model else 0)
        for n, w in case.waits.items()
        if w.call is not None and not w.call.members and (r := case.evidence.rank(n)) is not None and r.record
    ]
    return [
        r
        for r in case.evidence.ranks
        if (c := r.record) is not None
        and r.is_alive
        and is_bound_for_build(c.phase, c.phase_s, c.tick_s, c.num_groups)
        and any(
            0 <= c.group_seq <= seq and c.model is not None and built < c.model.number for seq, built in calls
        )
    ]
