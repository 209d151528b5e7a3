"""How do verdicts on calls that do not match read? Shared by AR252-AR258."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from allranks.watch import meeting
from allranks.watch.case import Case
from allranks.watch.evidence import Call
from allranks.watch.verdict import Verdict, many, ranks_text


def find_difference(
    case: Case, kinds: Sequence[str], code: str, name: str, words: str, fix: str, *, can_go_on: bool = False
) -> Verdict | None:
    """The verdict on the earliest place where the ranks' calls differ in one of these properties."""
    found = next((d for d in case.differences if d.what in kinds), None)
    if found is None or found is not case.differences[0]:
        return None
    culprits = [r for r in case.evidence.ranks if r.rank in found.odd]
    groups = _groups(found)
    said = "; ".join(
        f"{ranks_text(ranks)} {many(ranks, 'is', 'are')} in {_call(call, found.what)}"
        for ranks, call in groups
    )
    where = [
        f"{case.at(call.where)}   ({ranks_text(ranks)})"
        for ranks, call in _culprits_first(groups, found.odd)
        if call.where
    ]
    facts = [
        f"{ranks_text(ranks)}: {meeting.call_text(call)}, number {found.seq} of the group"
        for ranks, call in groups
    ]
    verdict = case.verdict(
        code,
        name,
        f"{words}: {said}",
        culprits,
        where=where,
        facts=facts,
        fix=fix,
        others=case.others(found.odd),
        can_go_on=can_go_on,
    )
    return _at_the_call(verdict, list(found.calls.values()))


def _at_the_call(verdict: Verdict, calls: Sequence[Call]) -> Verdict:
    """With the step and the age of the calls, where all ranks have come back from them: they may have gone on by many quick steps."""
    if not calls or any(c.is_inside or c.step == 0 for c in calls):
        return verdict
    since_s = None if verdict.since_s is None else max(c.age_s for c in calls)
    return replace(verdict, step=min(c.step for c in calls), since_s=since_s)


def _groups(found: meeting.Difference) -> list[tuple[list[int], Call]]:
    by_key: dict[object, tuple[list[int], Call]] = {}
    for rank, call in sorted(found.calls.items()):
        by_key.setdefault(meeting.key_of(call, found.what), ([], call))[0].append(rank)
    return list(by_key.values())


def _culprits_first(
    groups: list[tuple[list[int], Call]], odd: tuple[int, ...]
) -> list[tuple[list[int], Call]]:
    return sorted(groups, key=lambda g: (g[0][0] not in odd, -g[0][0]))


def _call(call: Call, what: str) -> str:
    if what == "op":
        return call.op
    if what == "reduce_op":
        return f"{call.op} with {call.reduce_op}"
    if what == "line" and call.where is not None:
        return f"{call.op} at {call.where.file.rsplit('/', 1)[-1]}:{call.where.line}"
    return meeting.call_text(call)
