"""AR744 no-data: a rank's loader gives nothing, while others have batches."""

from __future__ import annotations

from allranks.watch.case import Case
from allranks.watch.noted import by_rank, on_all, place, say, who
from allranks.watch.verdict import Verdict, many, ranks_text

CODE, NAME = "AR744", "no-data"


def find(case: Case) -> Verdict | None:
    """The same pass ended without a batch on some ranks only."""
    for _, found in on_all(case, "seen", "loader", "number", "line"):
        empty = [r for r, n in found.items() if n["drawn"] == 0]
        full = [r for r, n in found.items() if n["drawn"] > 0]
        if not empty or not full:
            continue
        facts = next(
            (n for n in by_rank(case, "pass").get(empty[0], []) if n["loader"] == found[empty[0]]["loader"]),
            None,
        )
        name = facts["dataset"]["class"] if facts and "dataset" in facts else "its data set"
        counts = ", ".join(f"{n['drawn']} on rank {r}" for r, n in found.items())
        return say(
            case,
            CODE,
            NAME,
            f"{who(case, empty)} {many(empty, 'has', 'have')} no data: the loader of {name} gave no batch, and {ranks_text(full)} had some",
            empty,
            where=[
                place(found[empty[0]]),
                place(facts["dataset"], "code") if facts and "dataset" in facts else None,
            ],
            facts=[
                f"batches of this pass: {counts}",
                "fewer shards or files than ranks leave some without any",
            ],
            fix="at least as many shards as ranks x loader workers; or divide by samples, not by shards",
        )
    return None
