"""AR749 split-differs: ranks have split one data set differently, so that what one evaluates another trains on."""

from __future__ import annotations

from allranks.watch.case import Case
from allranks.watch.noted import Note, on_all, place, say, who
from allranks.watch.verdict import Verdict

CODE, NAME = "AR749", "split-differs"


def find(case: Case) -> Verdict | None:
    """A Subset whose indices differ between ranks, divided between them by a sampler as if they were the same."""
    for _, found in on_all(case, "pass", "loader", "number", "line"):
        parts = {rank: _indices(n) for rank, n in found.items()}
        if any(p is None for p in parts.values()) or any(
            n.get("num_replicas", 0) < 2 for n in found.values()
        ):
            continue
        orders = {rank: (p[2], tuple(p[4])) for rank, p in parts.items() if p is not None}
        if len({hash for hash, _ in orders.values()}) < 2:
            continue
        ranks = sorted(found)
        odd = [r for r in ranks if orders[r][0] != orders[ranks[0]][0]]
        first = {r: ", ".join(orders[r][1]) for r in (ranks[0], odd[0])}
        return say(
            case,
            CODE,
            NAME,
            f"{who(case, ranks)} have split the data set differently: the Subset's indices are not the same",
            ranks,
            where=[place(found[ranks[0]])],
            facts=[
                *(f"rank {r}: {text} ..." for r, text in first.items()),
                "the sampler divides them as if they were: some come twice, some never; what one rank evaluates another trains on",
            ],
            fix="random_split(dataset, lengths, generator=torch.Generator().manual_seed(0)): the same on all ranks",
        )
    return None


def _indices(note: Note) -> list | None:
    dataset = note.get("dataset") or {}
    if dataset.get("class") != "Subset":
        return None
    return next((p for p in dataset["parts"] if p[0] == "indices" and p[1] > 1), None)
