"""Which agents are connected to the hub, and which have been lost?

Greets who connects, refuses who does not belong, reads all links, and notices silence. What follows from it is the hub's business.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from allranks.core.errors import StartError
from allranks.core.job import NodeInfo
from allranks.run import roster
from allranks.run.roster import Hello, Seat
from allranks.run.wire import Link, Message, silence

BEAT_S = 0.25
HELLO_LIMIT_S = 10.0
MAX_STRANGERS = 256
"""Connections that have not said hello; more are turned away, so that a port scan costs little."""


@dataclass(slots=True)
class Node:
    """A connected agent."""

    link: Link
    hello: Hello
    joined_at: float
    address: str = ""
    seat: Seat | None = None
    row: Mapping[str, Any] = field(default_factory=dict)
    row_at: float = 0.0
    stopped: bool = True
    lost_why: str = ""
    _restart: int = 0

    def begin(self, seat: Seat, restart: int) -> None:
        """An attempt begins, with this node in it."""
        self.seat, self.stopped, self.row, self._restart = seat, False, {}, restart

    def take_row(self, row: Mapping[str, Any], now: float) -> None:
        """A beat has come; what it says of an attempt before this one is left out."""
        self.row, self.row_at = (row if row.get("restart", self._restart) == self._restart else {}), now


class Members:
    """All links of the hub.

    Args:
        own: The link to the agent of the hub's own node, and its hello; always first in `nodes`.
        where: host:port of the meeting point, for messages.
        silence_s: After so long without a word a node is lost.
        address: This node's address, if the user gave it.
    """

    def __init__(self, own: tuple[Link, Hello], where: str, silence_s: float, address: str = "") -> None:
        self.nodes: list[Node] = [Node(own[0], own[1], time.monotonic())]
        self.where, self.silence_s, self.own_address = where, silence_s, address
        self.strangers: list[tuple[Link, str, str]] = []
        self._next_beat = 0.0

    @property
    def own(self) -> Node:
        return self.nodes[0]

    @property
    def present(self) -> list[Node]:
        """Those that are not lost."""
        return [n for n in self.nodes if not n.lost_why]

    def welcome(self, link: Link, peer_address: str, our_address: str) -> None:
        """A connection has come in; it becomes a node when it says hello."""
        if len(self.strangers) >= MAX_STRANGERS:
            link.close("too many connections")
            return
        self.strangers.append((link, peer_address, our_address))

    def greet(self, job_id: str, now: float) -> tuple[list[Node], list[StartError]]:
        """Those who have said hello since the last call: new nodes, and why others were refused."""
        waiting, admitted, refused = [], [], []
        for link, peer, ours in self.strangers:
            messages = link.receive()
            hello = next((Hello.from_json(m) for m in messages if m["kind"] == "hello"), None)
            if link.closed or (not hello and messages) or now - link.heard_at > HELLO_LIMIT_S:
                link.close("no hello")
            elif hello is None:
                waiting.append((link, peer, ours))
            elif error := self._refusal(hello):
                refused.append(error)
                parts = {k: getattr(error, k) for k in ("code", "what", "why", "fix", "where")}
                link.send({"kind": "refuse", **parts})
            else:
                self.own_address = self.own_address or ours
                link.send({"kind": "welcome", "job_id": job_id, "hub": self.own.hello.host})
                admitted.append(Node(link, hello, now, hello.local_addr or peer))
        self.strangers = waiting
        self.nodes += admitted
        return admitted, refused

    def _refusal(self, hello: Hello) -> StartError | None:
        return roster.refusal(hello, self.own.hello, [n.hello for n in self.present], self.where)

    def read(self, now: float) -> list[tuple[Node, Message]]:
        """What all nodes have said since the last call; beats are taken in here."""
        said: list[tuple[Node, Message]] = []
        for node in self.nodes:
            for message in node.link.receive():
                if message["kind"] == "beat":
                    node.take_row(message.get("row") or {}, now)
                else:
                    said.append((node, message))
        return said

    def newly_lost(self, now: float) -> list[Node]:
        """Nodes found lost in this call."""
        found: list[Node] = []
        for node in self.nodes[1:]:
            why = node.link.closed or silence(node.link, now, self.silence_s)
            if why and not node.lost_why:
                node.lost_why = why
                found.append(node)
        return found

    def forget(self, node: Node) -> None:
        node.link.close()
        self.nodes.remove(node)

    def beat(self, now: float) -> None:
        """Let the nodes hear that the hub lives."""
        if now >= self._next_beat:
            self._next_beat = now + BEAT_S
            for node in self.nodes[1:]:
                node.link.send({"kind": "beat"})

    def broadcast(self, kind: str, **fields: Any) -> None:
        for node in self.nodes:
            node.link.send({"kind": kind, **fields})

    def address(self, node: Node) -> str:
        """By which the other nodes reach this one."""
        return node.address if node is not self.own else self.own_address

    def infos(self, nodes: list[Node], own_row: Mapping[str, Any], now: float) -> dict[int, NodeInfo]:
        """What the watcher is told of these nodes."""
        return {
            n.seat.node_rank: NodeInfo(
                node_rank=n.seat.node_rank,
                host=n.hello.host,
                ranks=n.seat.ranks,
                row=n.row if n is not self.own else own_row,
                age_s=now - n.row_at if n is not self.own and n.row_at else 0.0,
                is_lost=bool(n.lost_why),
                lost_why=n.lost_why,
                address=self.address(n),
            )
            for n in nodes
            if n.seat is not None
        }
