"""AR745 same-randomness: the samples of several ranks are made with the same random numbers."""

from __future__ import annotations

from allranks.watch.case import Case
from allranks.watch.noted import by_rank, place, say, who
from allranks.watch.verdict import Verdict

CODE, NAME = "AR745", "same-randomness"


def find(case: Case) -> Verdict | None:
    """Reading samples drew from generators that were in the same state on two ranks."""
    found: dict[tuple[str, int, int], list[int]] = {}
    datasets: set[str] = set()
    codes = []
    for rank, own in sorted(by_rank(case, "draws").items()):
        for note in own:
            datasets.add(note["dataset"])
            codes.append(place(note, "code"))
            for name, state in note["states"].items():
                found.setdefault((name, note["worker"], state), []).append(rank)
    twins = {key: ranks for key, ranks in found.items() if len(set(ranks)) > 1}
    if not twins:
        return None
    ranks = sorted({r for own in twins.values() for r in own})
    names = sorted({name for name, _, _ in twins})
    has_workers = any(worker >= 0 for _, worker, _ in twins)
    places = " in the loader workers" if has_workers else ""
    lines = [place(n) for r in ranks for n in by_rank(case, "pass").get(r, [])][:1]
    return say(
        case,
        CODE,
        NAME,
        f"{who(case, ranks)} make samples of {', '.join(sorted(datasets))} with the same random numbers ({', '.join(names)})",
        ranks,
        where=[*codes[:1], *lines],
        facts=[
            f"before the same batch their generators were in one state{places}, and reading drew from them",
            "so augmentation or noise is the same on all of them: the seed does not depend on the rank",
        ],
        fix="seed with the rank before the loop: torch.manual_seed(seed + rank); random.seed(seed + rank); numpy.random.seed(seed + rank)\n"
        "after DDP is built, which gives rank 0's parameters to all",
    )
