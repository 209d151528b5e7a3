"""AR321 agent-died: the launcher of a node ended, and its ranks with it."""

from __future__ import annotations

from allranks.watch.case import Case
from allranks.watch.causes.node_lost import say, was_closed
from allranks.watch.verdict import Verdict

CODE, NAME = "AR321", "agent-died"


def find(case: Case) -> Verdict | None:
    lost = [n for n in case.evidence.nodes if n.is_lost and was_closed(n)]
    if not lost or case.evidence.here is not None:
        return None
    return say(
        case,
        CODE,
        NAME,
        lost,
        "lost its agent: `allranks run` was killed there, or its ssh session was closed",
    )
