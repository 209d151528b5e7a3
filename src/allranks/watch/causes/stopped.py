"""AR221 rank-stopped: a rank's process is stopped by a signal, a frozen container or a tracer."""

from __future__ import annotations

from allranks.watch.case import Case
from allranks.watch.evidence import Rank
from allranks.watch.verdict import Verdict, many

CODE, NAME = "AR221", "rank-stopped"


def find(case: Case) -> Verdict | None:
    stopped = [r for r in case.evidence.ranks if r.exit is None and (r.state in ("T", "t") or _is_frozen(r))]
    if not stopped:
        return None
    pids = " ".join(str(r.pid) for r in stopped)
    verb = many([r.rank for r in stopped], "is", "are")
    traced = next((r.tracer for r in stopped if r.tracer), "")
    if any(r.state == "t" for r in stopped):
        what, why = (
            "stopped by a tracer (state t)",
            f"traced by {traced}" if traced else "a debugger or tracer holds it",
        )
        fix = "let the tracer go on or detach (gdb: detach; strace: Ctrl-C)"
    elif all(_is_frozen(r) for r in stopped):
        what, why = (
            "frozen (stopped by its container's freezer)",
            f"in the kernel's {stopped[0].wchan}: its cgroup is frozen",
        )
        fix = "docker unpause / the scheduler's resume, or echo THAWED into the cgroup's freezer.state"
    else:
        what, why = (
            "stopped (SIGSTOP, state T)",
            "the kernel's process state is T: stopped by a signal (SIGSTOP, SIGTSTP, Ctrl-Z)",
        )
        fix = f"kill -CONT {pids}   wakes it; if a scheduler suspended the job, it will wake it by itself"
    return case.verdict(
        CODE,
        NAME,
        f"{case.who(stopped)} {verb} {what}{case.waits_for(stopped)}",
        stopped,
        facts=[why, f"process {pids}; its record has not moved since"],
        fix=fix,
    )


def _is_frozen(rank: Rank) -> bool:
    """Whether the kernel's freezer holds it: state D (cgroup v1) or S (v2), in a function of that name."""
    return "refrigerator" in rank.wchan or "freezer" in rank.wchan
