"""AR736 buffers-differ: each rank changes a buffer by its own data, and only rank 0's is kept, or none is the same."""

from __future__ import annotations

from allranks.watch.case import Case
from allranks.watch.noted import Note, by_rank, say, who
from allranks.watch.verdict import Verdict

CODE, NAME = "AR736", "buffers-differ"
MIN_CHECKS = 3


def find(case: Case) -> Verdict | None:
    """The same buffer differs at several checks that the ranks have in common, and at none of the last is it equal."""
    found = {
        rank: {(n["step"], n["seq"]): n for n in own}
        for rank, own in sorted(by_rank(case, "buffers").items())
    }
    if len(found) < max(2, case.evidence.world_size):
        return None
    keys = sorted(set.intersection(*(set(own) for own in found.values())))[-MIN_CHECKS:]
    if len(keys) < MIN_CHECKS:
        return None
    newest: dict[int, Note] = {rank: own[keys[-1]] for rank, own in found.items()}
    names = [row[0] for row in next(iter(newest.values()))["rows"]]
    guilty = [
        name for name in names if all(_differs([own[key] for own in found.values()], name) for key in keys)
    ]
    if not guilty:
        return None
    ranks, name = sorted(found), guilty[0]
    is_spread = bool(next(iter(newest.values()))["broadcast"])
    most = _most(list(newest.values()), name)
    what = "only rank 0's is kept" if is_spread else "no rank has the others' values"
    return say(
        case,
        CODE,
        NAME,
        f"{who(case, ranks)}: buffer {name} is changed by each rank's own data, and {what}",
        ranks,
        where=[f"buffer {n}" for n in guilty[:5]],
        facts=[
            f"it differs by up to {most:.3g} between the ranks after step {keys[-1][0]}, and at the checks before",
            "the next forward of DDP gives rank 0's to all (broadcast_buffers=True): what the others saw is lost"
            if is_spread
            else "with broadcast_buffers=False nothing makes buffers equal",
        ],
        fix="add up what the ranks saw before the update: dist.all_reduce(statistics), then change the buffer on all ranks alike\n"
        "a buffer that is meant to be each rank's own: register_buffer(..., persistent=False)",
        step=keys[-1][0],
        confidence="likely",
    )


def _row(note: Note, name: str) -> list | None:
    return next((row for row in note["rows"] if row[0] == name), None)


def _differs(own: list[Note], name: str) -> bool:
    rows = [_row(n, name) for n in own]
    return all(r is not None for r in rows) and len({r[1] for r in rows if r is not None}) > 1


def _most(own: list[Note], name: str) -> float:
    columns = zip(*(row[2] for n in own if (row := _row(n, name)) is not None), strict=False)
    return max((max(c) - min(c) for c in columns), default=0.0)
