"""AR743 not-split: loader workers, or ranks, read the same samples of an iterable data set."""

from __future__ import annotations

from allranks.watch.case import Case
from allranks.watch.noted import Note, by_rank, place, say, who
from allranks.watch.verdict import Verdict, ranks_text

CODE, NAME = "AR743", "not-split"


def find(case: Case) -> Verdict | None:
    """The first batches of two workers, or of two ranks, hold the same."""
    found = {rank: _batches(own) for rank, own in sorted(by_rank(case, "first").items())}
    workers = {rank: sorted(w for w in own if _has_twin(w, own)) for rank, own in found.items()}
    workers = {rank: twins for rank, twins in workers.items() if len(twins) > 1}
    ranks = sorted(r for r in found if any(o != r and _is_same(found[r], found[o]) for o in found))
    if not workers and len(ranks) < 2:
        return None
    one = next(n for own in by_rank(case, "first").values() for n in own)
    dataset = one["dataset"]
    guilty = ranks if len(ranks) > 1 else sorted(workers)
    parts, times = [], 1
    if workers:
        rank, twins = next(iter(workers.items()))
        parts.append(f"loader workers {', '.join(map(str, twins))} of {ranks_text([rank])}")
        times *= len(twins)
    if len(ranks) > 1:
        parts.append(ranks_text(ranks))
        times *= len(ranks)
    missing = [*(["get_worker_info()"] if workers else []), *(["the rank"] if len(ranks) > 1 else [])]
    lines = [place(n) for r in guilty for n in by_rank(case, "pass").get(r, []) if n.get("iterable")]
    return say(
        case,
        CODE,
        NAME,
        f"{who(case, guilty)}: each sample of {dataset} comes {times} times: {' and '.join(parts)} read the same",
        guilty,
        where=[place(one, "code"), *lines[:1]],
        facts=[f"the first batches are equal; the data set is not split by {' and '.join(missing)}"],
        fix="in __iter__: info = torch.utils.data.get_worker_info(); workers = info.num_workers if info else 1\n"
        "me = rank * workers + (info.id if info else 0); yield from itertools.islice(samples, me, None, world_size * workers)",
    )


def _batches(own: list[Note]) -> dict[int, dict[int, int]]:
    """worker -> number of the batch -> hash."""
    out: dict[int, dict[int, int]] = {}
    for n in own:
        out.setdefault(n["worker"], {}).setdefault(n["number"], n["hash"])
    return out


def _has_twin(worker: int, own: dict[int, dict[int, int]]) -> bool:
    return any(o != worker and _are_equal(own[worker], own[o]) for o in own)


def _is_same(one: dict[int, dict[int, int]], other: dict[int, dict[int, int]]) -> bool:
    """Whether two ranks' workers of the same number read the same."""
    both = set(one) & set(other)
    return bool(both) and all(_are_equal(one[w], other[w]) for w in both)


def _are_equal(one: dict[int, int], other: dict[int, int]) -> bool:
    both = set(one) & set(other)
    if not both or any(one[n] != other[n] for n in both):
        return False
    return len(both) == 1 or len({one[n] for n in both}) == len(
        both
    )  # batches that are all alike tell nothing
