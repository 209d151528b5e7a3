"""AR235 rank-waits-for-network: a rank waits for an answer from the network in code of the user's."""

from __future__ import annotations

from allranks.watch.case import Case, stuck_at
from allranks.watch.verdict import Verdict

CODE, NAME = "AR235", "rank-waits-for-network"


def find(case: Case) -> Verdict | None:
    found = case.doing("socket")
    if not found:
        return None
    return stuck_at(
        case,
        CODE,
        NAME,
        found,
        "waits for the network at a line of its own",
        facts=["its main thread reads from a socket that is no collective's"],
        fix="give the call a timeout; download once before the job, on one rank per node, behind a barrier",
    )
