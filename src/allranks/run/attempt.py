"""What is known of one start of the ranks on all nodes, and what is each node told to do for it?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from allranks.core.job import NodeInfo, RankExit
from allranks.run.members import Members, Node
from allranks.run.story import Story
from allranks.run.watching import Answer, Watching

LAST_LOOK_S = 1.2
"""How long a job that ended well waits for the watcher's last word."""


@dataclass(slots=True)
class Attempt:
    """One start of the ranks on all nodes."""

    restart: int
    nodes: list[Node]
    world_size: int
    started_at: float
    exits: dict[int, RankExit] = field(default_factory=dict)
    story: Story | None = None
    answer: Answer | None = None
    step: int | None = None
    """The farthest step of any rank when the story was told, if the record knows."""
    failed_at: float = 0.0
    _last_look: Answer | None = None
    _ended_at: float = 0.0

    @property
    def failed(self) -> list[RankExit]:
        """Ranks that ended badly, not by us."""
        return [e for e in self.exits.values() if e.failed and not e.by_us]

    @property
    def lost(self) -> list[Node]:
        return [n for n in self.nodes if n.lost_why]

    @property
    def is_broken(self) -> bool:
        return bool(self.failed or self.lost)

    def is_all_here(self, own_node_rank: int) -> bool:
        """Whether nothing more can be heard of the failure: all ranks have ended, and what those that failed left is on this node."""
        return len(self.exits) == self.world_size and all(e.node_rank == own_node_rank for e in self.failed)

    def is_heard_out(self, watching: Watching, now: float) -> bool:
        """All ranks have ended: whether the watcher has had its last look at what they left, and what it said was collected."""
        if any(e.failed for e in self.exits.values()):
            return True
        if self._last_look is None:
            self._last_look, self._ended_at = watching.last_look(), now
        answer = self._last_look
        is_done = answer.is_there and answer.value is not False and watching.verdicts.empty()
        return is_done or now - self._ended_at > LAST_LOOK_S

    def listing(self, members: Members) -> list[dict[str, Any]]:
        """The nodes as every node is told of them, in the order of their ranks."""
        return [
            {
                "host": n.hello.host,
                "address": members.address(n),
                "ranks": list(n.seat.ranks) if n.seat else [],
            }
            for n in self.nodes
        ]

    def orders(self, node: Node, listed: list[dict[str, Any]], members: Members) -> dict[str, Any]:
        """What one node needs to know to start its ranks."""
        assert node.seat is not None
        return {
            "restart": self.restart,
            "node_rank": node.seat.node_rank,
            "first_rank": node.seat.first_rank,
            "world_size": self.world_size,
            "nodes": listed,
            "address": members.address(node),
            "hub": members.own.seat.node_rank if members.own.seat else 0,
        }


def farthest_step(nodes: Mapping[int, NodeInfo]) -> int | None:
    """From the watchers' rows; None if nobody is watched or counts steps."""
    steps: list[int] = []
    for node in nodes.values():
        try:
            from allranks.watch.rows import Row

            steps += [Row.from_json(values).step for values in node.row.get("ranks", ())]
        except (ImportError, TypeError, ValueError):  # another version's row
            continue
    return max(steps, default=0) or None
