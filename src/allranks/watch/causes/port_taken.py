"""AR306 port-taken: another process listens on the job's port."""

from __future__ import annotations

import re

from allranks.watch.case import Case
from allranks.watch.verdict import Verdict

CODE, NAME = "AR306", "port-taken"

_TAKEN = re.compile(r"EADDRINUSE|address already in use", re.I)
_PORT = re.compile(r"port: (\d+)|:(\d{2,5})\b")


def find(case: Case) -> Verdict | None:
    for rank in case.roots:
        text = rank.failure.message if rank.failure else ""
        if not _TAKEN.search(text):
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
