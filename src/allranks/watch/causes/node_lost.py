"""AR320 node-lost: a node does not answer any more: its cable, its power, or the network between."""

from __future__ import annotations

from allranks.watch.case import Case
from allranks.watch.evidence import Node
from allranks.watch.verdict import Verdict, many, ranks_text, seconds

CODE, NAME = "AR320", "node-lost"

#: Words of the agent for a connection that ended rather than fell silent.
CLOSED = ("closed", "reset", "ended", "refused", "gone")


def find(case: Case) -> Verdict | None:
    lost = [
        n
        for n in case.evidence.nodes
        if n.is_lost and not was_closed(n) and n.node_rank != case.evidence.here
    ]
    if not lost or case.evidence.here is not None:
        return None
    return say(case, CODE, NAME, lost, "is silent: host down, cable cut, or a network that drops everything")


def was_closed(node: Node) -> bool:
    """Whether its agent's connection ended (its host answered), rather than fell silent."""
    return any(word in node.lost_why.lower() for word in CLOSED)


def say(case: Case, code: str, name: str, lost: list[Node], what: str) -> Verdict:
    """The verdict on lost nodes."""
    numbers = sorted({n for node in lost for n in node.ranks})
    hosts = ", ".join(f"{n.host}, {n.address}" if n.address else n.host for n in lost)
    nodes = (
        many([n.node_rank for n in lost], "node", "nodes")
        + " "
        + " and ".join(str(n.node_rank) for n in lost)
    )
    facts = [_heard(n) for n in lost]
    stuck = [(r, s) for r in case.evidence.ranks for s in r.sockets if s.tx_queue and s.retransmits]
    facts += [
        f"rank {r.rank}'s data to {s.peer} is not acknowledged ({s.retransmits} retransmissions)"
        for r, s in stuck[:2]
    ]
    here = [r.rank for r in case.evidence.ranks if r.rank not in numbers]
    return Verdict(
        code=code,
        name=name,
        what=f"{nodes} ({hosts}) with {ranks_text(numbers)} {what}",
        ranks=tuple(numbers),
        hosts=tuple(n.host for n in lost),
        since_s=max((n.lost_s for n in lost if n.lost_s >= 0.1), default=None),
        step=case.step(list(case.evidence.ranks)),
        others=case.others(numbers)
        or f"{ranks_text(here)} cannot go on without {'it' if len(numbers) == 1 else 'them'}",
        facts=tuple(facts),
        fix="see whether the host is up (ping, its console) and the switch; restart the job without it, or when it is back",
        can_go_on=False,
    )


def _heard(node: Node) -> str:
    """'nothing heard from gpu-b for 1.5 s', with what the agent saw."""
    if node.lost_s < 0.1:
        return f"{node.host}: {node.lost_why or 'nothing heard'}"
    return f"nothing heard from {node.host} for {seconds(node.lost_s)}{': ' + node.lost_why if node.lost_why else ''}"
