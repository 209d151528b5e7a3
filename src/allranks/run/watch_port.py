"""What does the agent tell its watcher about the job, and what does it do when the watcher asks?

The agent's side of the seam (watch_seam.py): it makes the Job and the NodeInfos, and is the Talk.
"""

from __future__ import annotations

import queue
from collections.abc import Mapping, Sequence
from typing import Any

from allranks.core.job import Job, NodeInfo
from allranks.run.hub import Hub
from allranks.run.local import LocalRanks
from allranks.run.options import Options


class WatchPort:
    """The Talk of one agent.

    Args:
        hub: The hub if it lives in this agent; without it, asking has no effect.
    """

    def __init__(self, hub: Hub | None) -> None:
        self.hub = hub
        self._local: LocalRanks | None = None
        self._nodes: list[dict[str, Any]] = []
        self._hub_rank = 0
        self._asked: queue.SimpleQueue[tuple[dict[str, Any], Sequence[int] | None]] = queue.SimpleQueue()

    def begin(self, local: LocalRanks, nodes: list[dict[str, Any]], hub_rank: int) -> None:
        """An attempt has been started."""
        self._local, self._nodes, self._hub_rank = local, nodes, hub_rank

    def ask(self, request: dict[str, Any], node_ranks: Sequence[int] | None = None) -> None:
        """Talk.ask; called in the watcher's thread, done by the agent's loop, which owns the sockets."""
        self._asked.put((request, node_ranks))

    def event(self, record: dict[str, Any]) -> None:
        """Talk.event."""
        if self.hub is not None:
            self.hub.event(
                str(record.get("event", "watch")), **{k: v for k, v in record.items() if k != "event"}
            )

    def send_asked(self) -> None:
        """Send what has been asked since the last call."""
        while not self._asked.empty():
            request, node_ranks = self._asked.get()
            for node in self.hub.attempt.nodes if self.hub is not None and self.hub.attempt else ():
                if node_ranks is None or (node.seat is not None and node.seat.node_rank in node_ranks):
                    node.link.send({"kind": "ask", "request": request})

    def node_infos(self, row: Mapping[str, Any], hub_lost: str, silent_s: float) -> dict[int, NodeInfo]:
        """What this node knows without the hub: itself, and whether the hub is there."""
        infos: dict[int, NodeInfo] = {}
        for number in {self._hub_rank, self._local.place.node_rank} if self._local else ():
            is_hub = number == self._hub_rank
            infos[number] = self._info(
                number,
                row={} if is_hub else row,
                age_s=silent_s if is_hub else 0.0,
                is_lost=is_hub and bool(hub_lost),
                lost_why=hub_lost if is_hub else "",
            )
        return infos

    def job(self, options: Options) -> Job:
        """The attempt, as the watcher gets it."""
        assert self._local is not None
        place = self._local.place
        return Job(
            job_id=place.job_id,
            run_dir=place.run_dir,
            record_dir=place.node_dir / "record" if options.watch and place.node_dir else None,
            host=self._local.host,
            node_rank=place.node_rank,
            is_hub=self.hub is not None,
            world_size=place.world_size,
            restart=place.restart,
            ranks=self._local.processes(),
            nodes=tuple(self._info(i) for i in range(len(self._nodes))),
            on_hang=options.on_hang,
            after_s=options.after_s,
        )

    def _info(self, number: int, **known: Any) -> NodeInfo:
        node = self._nodes[number]
        return NodeInfo(
            node_rank=number, host=node["host"], ranks=tuple(node["ranks"]), address=node["address"], **known
        )
