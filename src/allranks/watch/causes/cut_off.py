"""AR322 node-cut-off: this node lost the first node, which decides for all; what it sees is its own."""

from __future__ import annotations

from dataclasses import replace

from allranks.watch.case import Case
from allranks.watch.causes.node_lost import say as say_lost
from allranks.watch.causes.node_lost import was_closed
from allranks.watch.verdict import Verdict

CODE, NAME = "AR322", "node-cut-off"


def find(case: Case) -> Verdict | None:
    here = case.evidence.here
    if here is None:
        return None
    hub = [n for n in case.evidence.nodes if n.is_lost and n.node_rank == case.evidence.hub]
    own = next((n for n in case.evidence.nodes if n.node_rank == here), None)
    if not hub or own is None:
        return None
    if was_closed(hub[0]):
        what = "lost its agent: `allranks run` ended there"
    else:
        what = f"is silent: that host is down, or {own.host} is cut off from the network"
    verdict = say_lost(case, CODE, NAME, hub, what)
    return replace(verdict, seen_by=f"from {own.host} (node {here}) alone; the other nodes may know more")
