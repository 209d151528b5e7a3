"""AR203 rank-aborted: a library called abort() in a rank."""

from __future__ import annotations

import signal

from allranks.watch.case import Case
from allranks.watch.evidence import Rank
from allranks.watch.stacks import user_place
from allranks.watch.verdict import Place, Verdict

CODE, NAME = "AR203", "rank-aborted"


def find(case: Case) -> Verdict | None:
    root = next((r for r in case.roots if r.exit and r.exit.signal == signal.SIGABRT), None)
    if root is None or root is not case.roots[0]:
        return None
    said = said_at_abort(root)
    place, late = crash_place(root), after_its_end(root)
    return case.verdict(
        CODE,
        NAME,
        f"{case.who([root])} was aborted (SIGABRT){late}{': ' + said if said else ''}",
        [root],
        where=case.frames([place]) if place else None,
        facts=[said, "abort() in a library: no Python handler runs, so there is no traceback"],
        fix=LATE_FIX
        if late
        else "the line says what it was doing; if it communicates, compare what the other ranks do there",
        can_go_on=False,
    )


LATE_FIX = "nothing your script does is at fault or lost; update torch (2.13 on gloo does this now and then), or end it with os._exit(0)"


def after_its_end(rank: Rank) -> str:
    """Words for a rank that died while its interpreter was being taken apart; empty if its script was still running."""
    return " after its script had ended" if rank.record and rank.record.exit_kind == "ended" else ""


def said_at_abort(rank: Rank) -> str:
    """What the library said as it aborted."""
    for line in reversed(rank.output):
        if "what():" in line:
            return line.split("what():", 1)[1].strip()[:160]
    return next(
        (
            line.strip()[:160]
            for line in reversed(rank.output)
            if "terminate called" in line or "Assertion" in line
        ),
        "",
    )


def crash_place(rank: Rank) -> Place | None:
    """The user's line a dying rank was at: from the dump it left, else from its record."""
    ordered = sorted(rank.crash, key=lambda s: not s.is_main)
    found = next((p for s in ordered if (p := user_place(s.frames)) is not None), None)
    return found or (rank.record.where if rank.record else None)
