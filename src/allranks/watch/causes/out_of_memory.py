"""AR202 rank-out-of-memory: the kernel ended a rank because memory ran out."""

from __future__ import annotations

import signal

from allranks.watch.case import Case
from allranks.watch.causes.killed import SEEN
from allranks.watch.verdict import Verdict, many

CODE, NAME = "AR202", "rank-out-of-memory"


def find(case: Case) -> Verdict | None:
    root = case.roots[0] if case.roots else None
    if root is None or root.exit is None or root.exit.signal != signal.SIGKILL:
        return None
    node = case.node_of(root)
    logged = root.notes.get("oom", "")
    if not logged and (node is None or node.oom_kills <= 0):
        return None
    same = [
        r for r in case.roots if r.exit and r.exit.signal == signal.SIGKILL and r.node_rank == root.node_rank
    ]
    facts = [f"the kernel's log: process {root.pid} killed: {logged}"] if logged else []
    if node is not None and node.oom_kills > 0:
        facts.append(
            f"SIGKILL, and the kernel counts {node.oom_kills} kill(s) for memory on {node.host} since the job began"
        )
    if root.record is not None and root.record.is_seen:
        facts.append(SEEN)
    if node is not None and node.memory_limit_bytes:
        facts.append(f"memory limit {node.memory_limit_bytes / 1e9:.1f} GB")
    return case.verdict(
        CODE,
        NAME,
        f"{case.who(same)} {many([r.rank for r in same], 'was', 'were')} killed by the kernel's OOM killer (out of memory, SIGKILL)",
        same,
        facts=facts,
        fix="give the job more memory, use fewer loader workers or a smaller batch, or find what grows on this rank",
        can_go_on=False,
    )
