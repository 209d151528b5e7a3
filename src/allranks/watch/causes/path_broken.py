"""AR323 path-broken: the agents reach each other, but data between ranks is not acknowledged."""

from __future__ import annotations

from collections import Counter

from allranks.watch.case import Case
from allranks.watch.verdict import Verdict

CODE, NAME = "AR323", "path-broken"


def find(case: Case) -> Verdict | None:
    """Ranks wait, nobody is absent, and the kernel resends to one address without an answer."""
    if not case.waits or case.stuck or case.roots:
        return None
    silent = [(r, s) for r in case.evidence.ranks for s in r.sockets if s.tx_queue and s.retransmits >= 2]
    if not silent:
        return None
    peer = Counter(s.peer.rsplit(":", 1)[0] for _, s in silent).most_common(1)[0][0]
    node = next((n for n in case.evidence.nodes if n.address and n.address == peer), None)
    host = f"{node.host} ({peer})" if node else peer
    ranks = [r for r in case.evidence.ranks if node is not None and r.node_rank == node.node_rank]
    facts = [
        f"rank {r.rank} -> {s.peer}: {s.tx_queue} bytes unacknowledged, {s.retransmits} retransmissions"
        for r, s in silent[:3]
    ]
    return case.verdict(
        CODE,
        NAME,
        f"the network to {host} is broken for the ranks' data{f' ({case.who(ranks)})' if ranks else ''}",
        ranks,
        where=(),
        facts=facts,
        fix="a firewall or a dead link on the interface that gloo/NCCL uses: see GLOO_SOCKET_IFNAME / NCCL_SOCKET_IFNAME and the switch",
    )
