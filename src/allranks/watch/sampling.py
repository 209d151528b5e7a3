"""At which line of the user's does a slow rank stand, while it does what it spends more time on than the others?"""

from __future__ import annotations

from pathlib import Path

from allranks.record import page
from allranks.watch import gather
from allranks.watch.evidence import Rank
from allranks.watch.stacks import main_stack, user_place
from allranks.watch.verdict import Place


def places(rank: Rank | None, record_dir: Path | None, phase: str) -> list[Place]:
    """The line, if the rank was in `phase` ("" = any) before and after its stack was taken; else none."""
    if rank is None or (before := _mark(rank, record_dir, phase)) is None:
        return []
    target = gather.Target(rank.pid, gather.page_of(record_dir, rank.pid))
    main = main_stack(gather.take_stacks([target]).get(rank.pid, ("", ()))[1])
    place = user_place(main.frames) if main else None
    if place is None or _mark(rank, record_dir, phase) != before:
        return []  # it went on meanwhile: the stack may be of something else
    return [place]


def _mark(rank: Rank, record_dir: Path | None, phase: str) -> int | None:
    """What changes with every mark; None if the rank does something else."""
    if record_dir is None or not phase:
        return 0
    try:
        with page.PageReader(record_dir / f"{rank.pid}.page") as reader:
            glance = reader.glance()
    except (OSError, page.NotARecord):
        return 0
    return glance.marks if glance.phase.name.lower() == phase else None
