"""AR250 collective-not-entered: some ranks are in a collective that the others never call."""

from __future__ import annotations

from allranks.watch import meeting
from allranks.watch.case import Case
from allranks.watch.causes.aborted import said_at_abort
from allranks.watch.causes.finished import guard_facts
from allranks.watch.causes.uneven import batch_counts, counts_text
from allranks.watch.evidence import Rank
from allranks.watch.verdict import Verdict, many, ranks_text

CODE, NAME = "AR250", "collective-not-entered"
MIN_WAIT_S = 0.9


def find(case: Case) -> Verdict | None:
    """All wait, and no two calls of one number differ: some are in a call of their own, others in another call or in DDP's."""
    if case.absent or case.roots or len(case.waits) < 2:
        return None
    if case.evidence.trigger not in ("exit", "dying", "asked") and (case.waited_s() or 0.0) < MIN_WAIT_S:
        return None  # one rank may be about to leave the call before the one that another has entered
    kinds = meeting.standings(case.evidence, case.waits)
    if len(kinds) < 2:
        return None
    own = [n for n, w in case.waits.items() if w.call is not None]
    if not own:
        return None
    small = min((k for k in kinds if any(n in own for n in k)), key=len, default=None)
    if small is None:
        return None
    ranks = [r for r in case.evidence.ranks if r.rank in small]
    rest = [n for n in case.waits if n not in small]
    wait = case.waits[small[0]]
    where = [
        line
        for n in (*small[:1], *rest[:1])
        if (r := case.evidence.rank(n))
        for line in case.stands_at(r)[:2]
    ]
    facts = [
        *guard_facts(case, list(small)),
        *(f"rank {r.rank} aborted: {said_at_abort(r)}" for r in case.aborted),
    ]
    if not guard_facts(case, list(small)):
        facts += _loop_facts(case, ranks, rest) or _condition_facts(case, ranks, rest)
        facts += value_facts(case)
    counts = batch_counts(case)
    if len(set(counts.values())) > 1:
        facts.append(f"different number of batches per epoch, too: {counts_text(counts)}")
    steps = {r.rank: r.record.step for r in case.evidence.ranks if r.record}
    if len(set(steps.values())) > 1:
        facts.append("steps done: " + ", ".join(f"rank {n}: {s}" for n, s in sorted(steps.items())[:8]))
    return case.verdict(
        CODE,
        NAME,
        f"collective mismatch: {case.who(ranks)} {many(small, 'is', 'are')} in "
        f"{wait.text()}, which {ranks_text(rest)} {many(rest, 'does', 'do')} not enter",
        ranks,
        where=where,
        facts=facts,
        fix="every rank must call every collective: move it out of the condition on the rank, or let all ranks take the same branch",
        can_go_on=False,
    )


def _loop_facts(case: Case, ranks: list[Rank], rest: list[int]) -> list[str]:
    """The loop around the call that the others are not in: it goes round more often on these ranks."""
    theirs = {(p.at.file, p.at.line) for n in rest if (r := case.evidence.rank(n)) for p in r.loops}
    loops = {p for r in ranks for p in r.loops[:1] if (p.at.file, p.at.line) not in theirs}
    facts = []
    for loop in sorted(loops, key=lambda p: p.at.line):
        facts.append(
            f"the call is made in a loop, which goes round more often on some ranks: {case.at(loop.at)}"
        )
        if loop.condition is not None:
            facts.append(f"it depends on values that may differ between ranks: {case.at(loop.condition)}")
    made = {
        r.rank: max(0, r.record.issued - r.record.issued_at_step)
        for r in case.evidence.ranks
        if r.record is not None
    }
    if loops and len(set(made.values())) > 1:
        facts.append(
            "collectives called since the last step: "
            + ", ".join(f"rank {n}: {k}" for n, k in sorted(made.items())[:8])
        )
    return facts


def _condition_facts(case: Case, ranks: list[Rank], rest: list[int]) -> list[str]:
    """The `if` around the call, in which the others are not."""
    theirs = [r.condition for n in rest if (r := case.evidence.rank(n)) is not None]
    found = {r.condition for r in ranks if r.condition is not None and r.condition not in theirs}
    return [
        f"it depends on values that may differ between ranks: {case.at(place)}"
        for place in sorted(found, key=lambda p: p.line)
    ]


def value_facts(case: Case) -> list[str]:
    """'values there now: rank 0: val_loss = 0.25, kept = 0.3', of the ranks that are still in that function."""
    said = [
        f"rank {r.rank}: {', '.join(f'{v.name} = {v.text}' for v in r.values)}"
        for r in case.evidence.ranks
        if r.values
    ]
    return [f"values there now: {'; '.join(said[:4])}"] if said else []
