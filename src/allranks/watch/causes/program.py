"""AR234 rank-waits-for-program: a rank waits for a program that it started."""

from __future__ import annotations

from pathlib import PurePath

from allranks.watch.case import Case, stuck_at
from allranks.watch.evidence import Rank
from allranks.watch.verdict import Verdict

CODE, NAME = "AR234", "rank-waits-for-program"
MOST_PROGRAMS = 4


def find(case: Case) -> Verdict | None:
    found = case.doing("subprocess", "pipe")
    if not found:
        return None
    return stuck_at(
        case,
        CODE,
        NAME,
        found,
        "waits for another process",
        facts=["its main thread waits for a child process or a pipe", *_programs(found[0][0])],
        fix="give the call a timeout (subprocess.run(..., timeout=60)), and see what the program waits for",
    )


def _programs(rank: Rank) -> list[str]:
    """'process 7 is a child of it: sleep 300, in the kernel's hrtimer_nanosleep': no options, which may be secrets."""
    said = []
    for child in rank.workers[:MOST_PROGRAMS]:
        name, *words = child.command.split()[:2] or ["a program without a name"]
        shown = " ".join([PurePath(name).name, *(w for w in words if not w.startswith("-"))])
        waits = f", in the kernel's {child.wchan}" if child.wchan and child.state != "R" else ""
        said += [] if child.is_loader else [f"process {child.pid} is a child of it: {shown}{waits}"]
    return said
