"""Can it be seen, before anybody has waited for long, that ranks will not meet? From their rows, without asking them.

Three cases: models that differ as DDP is built, DDP's construction beside another call of the same number, and ranks that
disagree about who they are.
"""

from __future__ import annotations

from collections.abc import Mapping

from allranks.watch.meeting import POINT_TO_POINT
from allranks.watch.rows import Row

SETTLED_S = 0.3
"""What a row says is of one moment, and the numbers in it are up to 0.1 s old: so long it must have been so."""
NOT_COUNTED = ("new_group", "split_group", "destroy_process_group", *POINT_TO_POINT)


def signs(rows: Mapping[int, Row]) -> set[tuple[object, ...]]:
    """What cannot end well, each with a key of its own."""
    return {*_models(rows), *_builds(rows), *_names(rows)}


def _models(rows: Mapping[int, Row]) -> set[tuple[object, ...]]:
    """Ranks construct DDP, for the same time, on the only group there is, and gave it different models."""
    hashes: dict[int, set[int]] = {}
    for row in rows.values():
        if row.phase == "build" and row.num_groups == 0 and row.model[0] > 0:
            hashes.setdefault(row.model[0], set()).add(row.model[1])
    return {("models", number) for number, seen in hashes.items() if len(seen) > 1}


def _builds(rows: Mapping[int, Row]) -> set[tuple[object, ...]]:
    building = [r for r in rows.values() if is_bound_for_build(r.phase, r.phase_s, r.tick_s, r.num_groups)]
    calling = [
        r
        for r in rows.values()
        if r.op
        and not r.members
        and r.num_groups == 0
        and r.call_s >= SETTLED_S
        and not r.op.startswith(("wait(", *NOT_COUNTED))
    ]
    return {
        ("build", a.call_seq)
        for a in calling
        for b in building
        if 0 <= b.seq <= a.call_seq and a.model[0] < b.model[0]
    }


def is_bound_for_build(phase: str, phase_s: float, tick_s: float, num_groups: int) -> bool:
    """Whether a rank's next collective is surely that of DDP's construction, whatever it imports until then; its numbers are fresh."""
    return phase == "build" and num_groups == 0 and phase_s >= SETTLED_S and tick_s <= SETTLED_S


def _names(rows: Mapping[int, Row]) -> set[tuple[object, ...]]:
    """Ranks wait in init_process_group for each other under names that do not fit together."""
    said = [r.said for r in rows.values() if r.phase == "init" and r.phase_s >= SETTLED_S and r.said[0] >= 0]
    sizes = {size for _, size in said}
    if sizes == {1}:
        return set()  # each a world of its own, with a store of its own
    if len(sizes) > 1 or len({rank for rank, _ in said}) < len(said):
        return {("names", *sorted(said))}
    return set()
