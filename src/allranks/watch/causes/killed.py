"""AR201 rank-killed: a signal from outside ended a rank."""

from __future__ import annotations

import signal
from dataclasses import replace

from allranks.watch.case import Case
from allranks.watch.verdict import Alternative, Verdict, many

CODE, NAME = "AR201", "rank-killed"
SEEN = "its steps were quick: the line is one that was seen up to 0.4 s before"

_CRASHES = (
    signal.SIGSEGV,
    signal.SIGBUS,
    signal.SIGILL,
    signal.SIGFPE,
    signal.SIGABRT,
    signal.SIGTRAP,
    signal.SIGSYS,
)


def find(case: Case) -> Verdict | None:
    root = case.roots[0] if case.roots else None
    if root is None or root.exit is None or root.exit.signal is None or root.exit.signal in _CRASHES:
        return None
    number = root.exit.signal
    same = [r for r in case.roots if r.exit and r.exit.signal == number]
    name = signal_name(number)
    facts = [f"signal {number} ({name}) ended process {root.pid}"]
    if root.record is not None and root.record.is_seen:
        facts.append(SEEN)
    node = case.node_of(root)
    alternatives: tuple[Alternative, ...] = ()
    if number == signal.SIGKILL:
        if node is not None and node.memory_peak_bytes and node.memory_limit_bytes:
            facts.append(
                f"the kernel's counter shows no kill for memory (peak {_gb(node.memory_peak_bytes)} of {_gb(node.memory_limit_bytes)})"
            )
        else:
            alternatives = (
                Alternative("AR202", "the kernel's OOM killer", "`dmesg | grep -i oom` as root tells"),
            )
        fix = "SIGKILL comes from a person, a scheduler's limit (time, memory), or the kernel: see the job's limits and who may kill here"
    else:
        fix = f"find who sent {name}: a scheduler that preempts sends it to end the job; handle it on all ranks together"
    verdict = case.verdict(
        CODE,
        NAME,
        f"{case.who(same)} {many([r.rank for r in same], 'was', 'were')} killed by {name} (signal {number})",
        same,
        facts=facts,
        fix=fix,
        can_go_on=False,
    )
    return replace(verdict, alternatives=alternatives)


def signal_name(number: int) -> str:
    """'SIGKILL'."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _gb(value: int) -> str:
    return f"{value / 1e9:.1f} GB"
