"""What is known of one start of the ranks on all nodes, and what is each node told to do for it?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from allranks.core.job import NodeInfo, RankExit
from allranks.run.members import Members, Node
from allranks.run.story import Story
from allranks.run.watching import Answer, Watching

SETTLE_S = 0.3
"""How long to listen for other failures after the first: the culprit's exit may arrive after a victim's."""
REMAINS_S = 1.2
"""How long what failed ranks of other nodes left behind is waited for: it comes with a node's next beat, later where the node is busy."""
LAST_LOOK_S = 1.2
"""How long a job that ended well waits for the watcher's last word."""
HUNG_S = 30.0
"""How long a hang that was told, and in which nothing moves, is left alone after a signal that asks for the end. torchrun kills after as
long whatever moves; a rank that saves is not hurried here."""


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
    _told: tuple[str, list[int]] | None = None
    """The newest hang that was told: its code, and the steps of all ranks then."""
    _places: list[Any] = field(default_factory=list)
    _still_since: float = 0.0

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

    def is_heard(self, own_node_rank: int, nodes: Mapping[int, NodeInfo], now: float) -> bool:
        """Whether a failure can be judged: others were listened for, or all have ended, and what those that failed left behind is here."""
        elsewhere = {e.node_rank for e in self.failed} - {own_node_rank}
        since = now - self.failed_at
        if not elsewhere and len(self.exits) == self.world_size:
            return True
        return since >= REMAINS_S or (
            since >= SETTLE_S and all(self._has_sent(nodes.get(n)) for n in elsewhere)
        )

    def _has_sent(self, node: NodeInfo | None) -> bool:
        """What its failed ranks left behind; not waited for where nobody watches, or nothing more will come."""
        if node is None or node.is_lost or not node.row:
            return True
        sent = [one.get("exit") or {} for one in node.row.get("ended", ())]
        # Also ranks that ended well after errors are sent.
        has_failed = any(end.get("code") or end.get("signal") for end in sent)
        return has_failed and node.row.get("restart") == self.restart

    def is_heard_out(self, watching: Watching, now: float) -> bool:
        """All ranks have ended: whether the watcher has had its last look at what they left, and what it said was collected."""
        if any(e.failed for e in self.exits.values()):
            return True
        if self._last_look is None:
            self._last_look, self._ended_at = watching.last_look(), now
        answer = self._last_look
        is_done = answer.is_there and answer.value is not False and watching.verdicts.empty()
        return is_done or now - self._ended_at > LAST_LOOK_S

    def left(self) -> str:
        """The first ranks that have not ended, as 'rank 1' or 'ranks 0, 2'; "" if all have."""
        left = [str(rank) for rank in range(self.world_size) if rank not in self.exits]
        return f"rank{'s' * (len(left) > 1)} {', '.join(left[:16])}" if left else ""

    def note(self, verdict: Mapping[str, Any], nodes: Mapping[int, NodeInfo]) -> None:
        """A verdict was told, and the job goes on."""
        if verdict.get("since_s") is not None:
            self._told = str(verdict["code"]), [row.step for row in _rows(nodes)]

    def hung(self, nodes: Mapping[int, NodeInfo], now: float) -> str:
        """What keeps the ranks from ending, once nothing has moved for HUNG_S: the code of a hang that was told, or that ranks wait in
        init_process_group for some that have ended. "" if there is nothing like that.

        To be asked a few times a second from the moment on at which the job is to end.
        """
        rows = _rows(nodes)
        left = [row for row in rows if row.rank not in self.exits]
        places = [(row.rank, row.step, row.marks) for row in left]
        is_saving = any(row.phase == "checkpoint" for row in left)
        is_seen = bool(rows) and len(left) + len(self.exits) >= self.world_size
        # The wait for the other ranks is in C code, which Ctrl-C does not end.
        nobody_comes = bool(self.exits) and bool(left) and all(row.phase == "init" for row in left)
        is_told = self._told is not None and self._told[1] == [row.step for row in rows]
        has_moved = not (is_told or nobody_comes)
        if places != self._places or is_saving or has_moved or not is_seen:
            self._places, self._still_since = places, now
        if has_moved or now - self._still_since < HUNG_S:
            return ""
        self._still_since = now
        return self._told[0] if is_told and self._told else "ranks wait for others that have ended"

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
    return max((row.step for row in _rows(nodes)), default=0) or None


def _rows(nodes: Mapping[int, NodeInfo]) -> list[Any]:
    """What the watchers say of each rank."""
    rows: list[Any] = []
    for node in nodes.values():
        try:
            from allranks.watch.rows import Row

            rows += [Row.from_json(values) for values in node.row.get("ranks", ())]
        except (ImportError, TypeError, ValueError):  # another version's row
            continue
    return rows
