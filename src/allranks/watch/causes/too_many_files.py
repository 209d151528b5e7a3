"""AR209 too-many-open-files: a rank has no file descriptor left."""

from __future__ import annotations

import re

from allranks.watch.case import Case
from allranks.watch.verdict import Verdict

CODE, NAME = "AR209", "too-many-open-files"

_MANY = re.compile(r"Too many open files(?! in system)|received 0 items of ancdata|\bEMFILE\b", re.I)


def find(case: Case) -> Verdict | None:
    for rank in case.roots:
        text = (
            "\n".join((rank.failure.message, rank.failure.cause, *rank.failure.text)) if rank.failure else ""
        )
        if not _MANY.search(text):
            continue
        limit = rank.notes.get("files_limit", "")
        return case.verdict(
            CODE,
            NAME,
            f"{case.who([rank])} has too many open files{f' (limit {limit})' if limit else ''}",
            [rank],
            where=case.frames(rank.failure.frames) if rank.failure else None,
            facts=[
                rank.failure.message.split("\n")[0] if rank.failure else "",
                "each tensor from a loader worker holds one descriptor while it lives",
            ],
            fix=(
                "do not keep the batches (copy what you need: tensor.clone()), or ulimit "
                "-n 65535, or torch.multiprocessing.set_sharing_strategy('file_system')"
            ),
            can_go_on=False,
        )
    return None
