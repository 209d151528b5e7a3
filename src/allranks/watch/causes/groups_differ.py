"""AR257 new-group-mismatch: ranks make process groups of different members, or not all ranks make them."""

from __future__ import annotations

from allranks.watch.case import Case
from allranks.watch.evidence import Call, Rank
from allranks.watch.verdict import Verdict, many, ranks_text

CODE, NAME = "AR257", "new-group-mismatch"


def find(case: Case) -> Verdict | None:
    made = {r.rank: _groups(r) for r in case.evidence.ranks if r.record is not None}
    if case.roots or len(made) < 2 or not any(made.values()) or not (case.waits or case.differences):
        return None
    if not all(_is_whole(r) for r in case.evidence.ranks if r.record is not None):
        return None  # the oldest calls are forgotten, of some ranks sooner than of others: which call is which is not known
    late = {r.rank for r in case.stuck}
    for i in range(max(map(len, made.values()))):
        calls = {rank: groups[i] if i < len(groups) else None for rank, groups in made.items()}
        if len({c.members if c else None for c in calls.values()}) > 1:
            return (
                None if any(c is None and rank in late for rank, c in calls.items()) else _say(case, i, calls)
            )
    return None


def _is_whole(rank: Rank) -> bool:
    """Whether its record still holds its first call."""
    return rank.record is not None and (not rank.record.calls or rank.record.calls[0].number <= 1)


def _groups(rank: Rank) -> list[Call]:
    return [c for c in rank.record.calls if c.op == "new_group"] if rank.record else []


def _say(case: Case, i: int, calls: dict[int, Call | None]) -> Verdict:
    by_members: dict[str | None, list[int]] = {}
    for rank, call in calls.items():
        by_members.setdefault(call.members if call else None, []).append(rank)
    said = [
        f"{ranks_text(ranks)} {many(ranks, 'makes', 'make')} {_members(members)}"
        for members, ranks in by_members.items()
    ]
    fewest = min(by_members.values(), key=len)
    culprits = [
        r
        for r in case.evidence.ranks
        if r.rank in (fewest if len({len(v) for v in by_members.values()}) > 1 else calls)
    ]
    places = dict.fromkeys(case.at(c.where) for c in calls.values() if c and c.where)
    return case.verdict(
        CODE,
        NAME,
        f"new_group mismatch: {case.who(culprits)}: call {i + 1} of new_group is not the same on all ranks: {'; '.join(said)}",
        culprits,
        where=tuple(places),
        facts=["new_group is a collective of all ranks of the job, also of those that are not members"],
        fix="let every rank make every group, in the same order: groups = [dist.new_group(m) for m in ([0, 1], [2, 3])]",
        others=case.others(),
        can_go_on=False,
    )


def _members(members: str | None) -> str:
    if members is None:
        return "none"
    return f"a group of ranks [{members}]" if members else "a group of all ranks"
