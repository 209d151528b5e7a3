"""AR306 port-taken: another process listens on the job's port."""

from __future__ import annotations

import re

from allranks.watch.case import Case, is_of_torch
from allranks.watch.evidence import Rank
from allranks.watch.verdict import Verdict

CODE, NAME = "AR306", "port-taken"

_TAKEN = re.compile(r"EADDRINUSE|address already in use", re.I)
_PORT = re.compile(r"port: (\d+)|:(\d{2,5})\b")


def find(case: Case) -> Verdict | None:
    for rank in case.roots:
        text = rank.failure.message if rank.failure else ""
        if not _TAKEN.search(text) or not _is_of_job(rank):
            continue
        found = _PORT.search(text)
        port = (found[1] or found[2]) if found else ""
        owner = rank.notes.get("port_owner", "")
        free = rank.notes.get("free_port", "")
        return case.verdict(
            CODE,
            NAME,
            f"{case.who([rank])} cannot listen: port {port or '?'} is taken{f' by {owner}' if owner else ''}",
            [rank],
            where=case.frames(rank.failure.frames) if rank.failure else None,
            facts=[text.split("\n")[0][:200]],
            fix=f"--master-port {free}" if free else "--master-port 0 (or leave it out) takes a free one",
            can_go_on=False,
        )
    return None


def _is_of_job(rank: Rank) -> bool:
    """Whether torch wanted the port to let the ranks meet, and not the script for a server of its own."""
    failure = rank.failure
    if failure is None or not failure.frames:
        return failure is not None
    return failure.kind.startswith("Dist") or any(is_of_torch(f.file) for f in failure.frames)
