"""AR220 rank-in-debugger: a rank stands at a breakpoint."""

from __future__ import annotations

from allranks.watch.case import Case, stuck_at
from allranks.watch.evidence import Rank
from allranks.watch.verdict import Verdict

CODE, NAME = "AR220", "rank-in-debugger"


def find(case: Case) -> Verdict | None:
    quit = [r for r in case.roots if r.failure is not None and r.failure.kind == "BdbQuit"]
    if quit:
        return case.verdict(
            CODE,
            NAME,
            f"{case.who(quit)} came to a breakpoint, and has no terminal to stop at (BdbQuit)",
            quit,
            where=_lines(case, quit[0]),
            facts=["a rank's standard input is empty: the debugger quits at once"],
            fix="remove breakpoint() / set_trace(); to debug, run the script with one process: python train.py",
            can_go_on=False,
        )
    found = [(r, a) for r in _candidates(case) if (a := case.activity(r)).kind == "debugger"]
    if not found:
        return None
    return stuck_at(
        case,
        CODE,
        NAME,
        found,
        "stands at a breakpoint in a debugger",
        facts=["pdb is on its stack"],
        fix="remove breakpoint() / set_trace(), or let it stop on all ranks",
    )


def _lines(case: Case, rank: Rank) -> tuple[str, ...]:
    """The breakpoints of the program first."""
    frames = case.frames(rank.failure.frames) if rank.failure else ()
    return tuple(dict.fromkeys((*map(case.at, rank.related), *frames)))


def _candidates(case: Case) -> tuple[Rank, ...]:
    return case.stuck or (case.evidence.ranks if case.evidence.trigger in ("silence", "asked") else ())
