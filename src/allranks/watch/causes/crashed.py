"""AR204 rank-crashed: a rank died of a segmentation fault, a bus error or the like."""

from __future__ import annotations

import signal

from allranks.watch.case import Case
from allranks.watch.causes.aborted import LATE_FIX, after_its_end, crash_place
from allranks.watch.causes.killed import signal_name
from allranks.watch.verdict import Verdict

CODE, NAME = "AR204", "rank-crashed"

_WHAT = {
    signal.SIGSEGV: "segmentation fault",
    signal.SIGBUS: "bus error",
    signal.SIGILL: "illegal instruction",
    signal.SIGFPE: "arithmetic fault",
    signal.SIGTRAP: "trap",
    signal.SIGSYS: "forbidden system call",
}


def find(case: Case) -> Verdict | None:
    root = case.roots[0] if case.roots else None
    if root is None or root.exit is None or root.exit.signal not in _WHAT:
        return None
    number = signal.Signals(root.exit.signal)
    place = crash_place(root)
    facts = [f"signal {int(number)} ({signal_name(number)}) ended process {root.pid}"]
    late = after_its_end(root)
    fix = (
        LATE_FIX
        if late
        else "a C extension went wrong at this line; run the rank under gdb, or update the package"
    )
    node = case.node_of(root)
    if number == signal.SIGBUS and node is not None and node.shm_size_bytes:
        facts.append(
            f"/dev/shm: {(node.shm_free_bytes or 0) / 1e6:.0f} MB free of {node.shm_size_bytes / 1e6:.0f} MB"
        )
        fix = "a bus error is most often a full /dev/shm: raise it (docker --shm-size), or use fewer loader workers"
    return case.verdict(
        CODE,
        NAME,
        f"{case.who([root])} crashed{late}: {_WHAT[number]} ({signal_name(number)})",
        [root],
        where=case.frames([place]) if place else None,
        facts=facts,
        fix=fix,
        can_go_on=False,
    )
