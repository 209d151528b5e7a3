"""AR206 rank-finished-early: a rank came to the end of its script while others still train."""

from __future__ import annotations

from allranks.watch.case import Case
from allranks.watch.evidence import Rank
from allranks.watch.verdict import Verdict, many

CODE, NAME = "AR206", "rank-finished-early"


def find(case: Case) -> Verdict | None:
    done = [r for r in case.evidence.ranks if is_done(r)]
    waiting = case.waiting_for(done)
    if not done or not waiting or case.roots:
        return None
    numbers = [r.rank for r in done]
    facts = [f"{case.who(done)} ended with code 0 after {_steps(done)}"]
    behind = [r for r in case.evidence.ranks if r.rank in waiting]
    if _steps(behind) != _steps(done):
        facts.append(f"{case.who(behind)} {many(waiting, 'has', 'have')} done {_steps(behind)}")
    facts += guard_facts(case, waiting)
    return case.verdict(
        CODE,
        NAME,
        f"{case.who(done)} finished {many(numbers, 'its', 'their')} script normally while others still train{case.waits_for(done)}",
        done,
        where=tuple(w for n in waiting[:2] if (r := case.evidence.rank(n)) for w in case.stands_at(r)[:1]),
        facts=facts,
        fix="all ranks must make the same collectives: give each the same number of steps, and keep collectives out of rank guards",
        can_go_on=False,
    )


def is_done(rank: Rank) -> bool:
    """Whether the rank's script has come to its end, or left the process group for good."""
    if rank.exit is not None:
        return not rank.exit.failed and not rank.exit.by_us
    record = rank.record
    if record is None or record.exception is not None:
        return False
    return record.exit_kind == "ended" or (record.exit_kind == "" and record.phase == "exit")


def guard_facts(case: Case, ranks: list[int]) -> list[str]:
    """'train.py:20 lets only some ranks come here: if rank == 0:' for each of these ranks that stands under a rank guard."""
    guards = {case.at(r.guard) for n in ranks if (r := case.evidence.rank(n)) and r.guard is not None}
    return [f"only some ranks come to this line; the condition is at {g}" for g in sorted(guards)]


def _steps(ranks: list[Rank]) -> str:
    steps = sorted({r.record.step for r in ranks if r.record is not None})
    return "no known step" if not steps else f"{' or '.join(map(str, steps))} steps"
