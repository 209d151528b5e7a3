"""AR251 uneven-batches: the ranks have different numbers of batches."""

from __future__ import annotations

from allranks.watch.case import Case
from allranks.watch.causes.finished import guard_facts
from allranks.watch.evidence import Loader, Rank
from allranks.watch.verdict import Verdict, many, ranks_text

CODE, NAME = "AR251", "uneven-batches"


def find(case: Case) -> Verdict | None:
    counts = batch_counts(case)
    if len(set(counts.values())) < 2 or not case.waits or case.roots:
        return None
    if guard_facts(case, list(case.waits)):
        return None  # a call under a rank guard comes first; it names the batches, too
    short = [r for r in case.evidence.ranks if counts.get(r.rank) == min(counts.values())]
    if not _explains(case, short, counts):
        return None
    numbers = [r.rank for r in short]
    longest = [n for n, c in counts.items() if c == max(counts.values())]
    ends = [
        x.where
        for r in case.evidence.ranks
        if r.rank in (numbers[0], longest[0]) and (x := _loader(r)) and x.where
    ]
    where = [case.at(place) for place in ends]
    waits = [
        line for n in sorted(case.waits) if (r := case.evidence.rank(n)) for line in case.stands_at(r)[:1]
    ]
    few, much = min(counts.values()), max(counts.values())
    facts = [f"batches per epoch: {counts_text(counts)}", *epoch_facts(case)]
    return case.verdict(
        CODE,
        NAME,
        f"uneven batches: {case.who(short)} {many(numbers, 'has', 'have')} {few} "
        f"batches per epoch, {ranks_text(longest)} {many(longest, 'has', 'have')} {much}",
        short,
        where=tuple(dict.fromkeys(w for w in (*waits, *where) if w)),
        others=case.others(),
        facts=facts,
        fix="give all ranks the same number of batches: DistributedSampler, drop_last=True, or with model.join():",
        can_go_on=False,
    )


def batch_counts(case: Case) -> dict[int, int]:
    """Batches of one pass by rank: of a pass that is over what it drew, else what its loader says."""
    counts = {}
    for rank in case.evidence.ranks:
        loader = _loader(rank)
        if loader is not None:
            count = loader.drawn if loader.is_exhausted else loader.length
            if count >= 0:
                counts[rank.rank] = count
    return counts if len(counts) == len(case.evidence.ranks) else {}


def counts_text(counts: dict[int, int]) -> str:
    """'rank 0: 24, rank 1: 16'; the ranks of one number together."""
    by_count: dict[int, list[int]] = {}
    for rank, count in sorted(counts.items()):
        by_count.setdefault(count, []).append(rank)
    return ", ".join(f"{ranks_text(ranks)}: {count}" for count, ranks in by_count.items())


def epoch_facts(case: Case) -> list[str]:
    """Where each rank is in its passes over the data."""
    out = []
    for rank in case.evidence.ranks[:8]:
        loader = _loader(rank)
        if loader is not None and rank.record is not None:
            state = "exhausted" if loader.is_exhausted else f"batch {loader.drawn}"
            out.append(f"rank {rank.rank}: pass {loader.number}, {state}, step {rank.record.step}")
    return ["; ".join(out)] if out else []


def _loader(rank: Rank) -> Loader | None:
    return rank.record.loader if rank.record else None


def _explains(case: Case, short: list[Rank], counts: dict[int, int]) -> bool:
    """Whether the ranks do stand apart because of it: not in the same pass any more, or one is through and others are not."""
    loaders = [x for r in case.evidence.ranks if (x := _loader(r)) is not None]
    passes = {(x.number, x.is_exhausted) for x in loaders}
    return len(passes) > 1 or any(r.exit is not None for r in short)
