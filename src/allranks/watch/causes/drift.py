"""AR731 replicas-drift: the parameters of DDP's replicas are not the same on all ranks any more."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from allranks.watch.case import Case
from allranks.watch.evidence import Rank
from allranks.watch.numbers import compared, differs_at_last, has_drifted
from allranks.watch.observed import Check
from allranks.watch.verdict import Verdict, many, ranks_text

CODE, NAME = "AR731", "replicas-drift"


@dataclass(frozen=True, slots=True)
class _Difference:
    """The first check that differs."""

    key: tuple[int, int]
    hashes: dict[int, int]
    equal_at: tuple[int, int] | None
    """The last one before it that did not."""


@dataclass(frozen=True, slots=True)
class Drift:
    """The first check that differs, with what it is made of."""

    found: _Difference
    ranks: dict[int, Rank]
    checks: dict[int, Check]
    names: tuple[str, ...]
    """What differs, by name; empty where that is not known."""

    def since(self) -> str:
        """'since a check between step 16 and 32'."""
        if self.found.equal_at:
            return f"since a check between step {self.found.equal_at[0]} and {self.found.key[0]}"
        return f"since step {self.found.key[0]} or before"

    def value(self, rank: int, name: str) -> int:
        """What the row of that name holds on a rank."""
        record = self.ranks[rank].record
        return self.checks[rank].sums[record.checked.index(name)] if record else 0


def drift_of(case: Case) -> Drift | None:
    """Only where the trigger saw fingerprints that differ, and no loss that was not finite."""
    ranks = {r.rank: r for r in case.evidence.ranks if r.record is not None and r.record.checks}
    if case.evidence.trigger != "numbers" or any(r.record.not_finite for r in ranks.values() if r.record):
        return None
    checks = {
        n: tuple((c.step, c.seq, c.hash) for c in r.record.checks) for n, r in ranks.items() if r.record
    }
    if not has_drifted(checks) and not (_are_done(ranks) and differs_at_last(checks)):
        return None
    found = _first(compared(checks))
    ours = {n: check for n in found.hashes if (check := _check(ranks[n], found.key)) is not None}
    drift = Drift(found, ranks, ours, _names(ranks, ours))
    return drift if has_drifted(checks) or _is_of_training(drift) else None


def _are_done(ranks: dict[int, Rank]) -> bool:
    return all(r.record and (r.record.exit_kind or r.record.is_destroyed) for r in ranks.values())


def _is_of_training(drift: Drift) -> bool:
    """Whether a difference seen once, at the end, arose in training: parameters changed equally often since the check before.

    Rank 0 that is given its best weights when all is done changes them more often, and harms nobody.
    """
    changes = _changes(drift.ranks, drift.checks, drift.names, drift.found)
    return len(changes) == len(drift.checks) and len(set(changes.values())) == 1


def find(case: Case) -> Verdict | None:
    """The first parameter that differs, on whom, and since when."""
    drift = drift_of(case)
    if drift is None:
        return None
    found, ranks, ours, names = drift.found, drift.ranks, drift.checks, drift.names
    odd, fact = _odd(ranks, ours, names, found)
    parameter = names[0] if names else "a parameter"
    rest = f" and {len(names) - 1} more" if len(names) > 1 else ""
    subject, since = f"{parameter}{rest}", drift.since()
    others = [n for n in sorted(ours) if n not in odd]
    if odd and others:
        who = f"{subject} on {ranks_text(odd)} {_differ(names)} from {ranks_text(others)}"
    else:
        who = f"{subject} {_differ(names)} between {' and '.join(f'rank {n}' for n in sorted(ours))}"
    verdict = case.verdict(
        CODE,
        NAME,
        f"replicas drifted apart: {who} {since}",
        [ranks[n] for n in (odd or sorted(ours))],
        where=tuple(f"parameter {name}" for name in names[:5]),
        others="" if not others else f"{ranks_text(others)} {many(others, 'is as it was', 'are equal')}",
        facts=[
            fact,
            _steps_fact(ours),
            "compared bit by bit after steps whose backward averaged the gradients",
        ],
        fix="change parameters on all ranks alike, or on rank 0 and broadcast them: outside optimizer.step nobody makes them equal\n"
        "other reasons: a parameter unfrozen after DDP was built, a forward through .module, a gradient changed on one rank",
    )
    return replace(verdict, since_s=None, step=found.key[0])


def _steps_fact(checks: dict[int, Check]) -> str:
    """A rank that left out a step of the optimizer."""
    counts = {n: c.num_steps for n, c in sorted(checks.items())}
    if len(set(counts.values())) < 2:
        return ""
    said = ", ".join(f"{count} on rank {n}" for n, count in counts.items())
    return f"optimizer steps until then: {said}: likely a step was left out, or made twice, on one rank"


def _differ(names: tuple[str, ...]) -> str:
    return "differ" if len(names) > 1 else "differs"


def _first(seen: list[tuple[tuple[int, int], dict[int, int]]]) -> _Difference:
    """The first difference after which no check was equal."""
    at = len(seen)
    while at and len(set(seen[at - 1][1].values())) > 1:
        at -= 1
    return _Difference(*seen[at], seen[at - 1][0] if at else None)


def _check(rank: Rank, key: tuple[int, int]) -> Check | None:
    checks = rank.record.checks if rank.record else ()
    return next((c for c in checks if (c.step, c.seq) == key), None)


def _names(ranks: dict[int, Rank], checks: dict[int, Check]) -> tuple[str, ...]:
    """The parameters that differ; none where their sums are not known or their lists are not the same."""
    lists = {r.record.checked for n in checks if (r := ranks[n]).record}
    sums = [c.sums for c in checks.values()]
    if len(lists) != 1 or len({len(s) for s in sums}) != 1 or not sums[0]:
        return ()
    names = next(iter(lists))
    return tuple(name for i, name in enumerate(names) if len({s[i] for s in sums}) > 1)


def _odd(
    ranks: dict[int, Rank], checks: dict[int, Check], names: tuple[str, ...], found: _Difference
) -> tuple[list[int], str]:
    """Who is not like the others, and how that is known; nobody where it is not."""
    (most, count), *rest = Counter(c.hash for c in checks.values()).most_common()
    if not rest or count > rest[0][1]:
        odd = sorted(n for n, c in checks.items() if c.hash != most)
        return odd, f"{count} of {len(checks)} ranks agree"
    changes = _changes(ranks, checks, names, found)
    if len(set(changes.values())) < 2:
        return [], "which of them is right cannot be told from two kinds of ranks"
    least = min(changes.values())
    odd = sorted(n for n, times in changes.items() if times > least)
    more = ", ".join(f"{changes[n]} times on rank {n}" for n in sorted(changes))
    return odd, f"{names[0]} was changed in place {more}, since then: not only by optimizer.step"


def _changes(
    ranks: dict[int, Rank], checks: dict[int, Check], names: tuple[str, ...], found: _Difference
) -> dict[int, int]:
    """By rank, how often the first parameter was changed in place since the last equal check."""
    if not names or found.equal_at is None:
        return {}
    out = {}
    for n, check in checks.items():
        record, before = ranks[n].record, _check(ranks[n], found.equal_at)
        if record is None or before is None or not before.changes or not check.changes:
            return {}
        i = record.checked.index(names[0])
        out[n] = check.changes[i] - before.changes[i]
    return out
