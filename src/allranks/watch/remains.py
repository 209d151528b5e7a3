"""What do ranks that ended on one node leave behind, and how does the node that decides come to it?

Their records and the stacks of a crash lie on their own node; for a few seconds after the end they go along with its beats.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from allranks.core.job import Job, NodeInfo, RankExit
from allranks.watch import bundle
from allranks.watch.evidence import Node, Rank, from_json, to_json

KEEP_S = 4.0
MOST = 3
"""Ranks of one node whose remains are sent: the first that failed explains the others. And so many that ended well after errors."""
_CALLS, _STACKS, _NOTES = 12, 6, 12


class Remains:
    """Of the ranks of this node that failed, and of those that ended well after errors that they had caught."""

    def __init__(self) -> None:
        self._kept: dict[bool, list[tuple[float, dict[str, Any]]]] = {True: [], False: []}

    def add(self, ended: RankExit, folder: Path | None) -> None:
        """A rank of this node has ended, not by us."""
        kept = self._kept[ended.failed]
        if len(kept) < MOST:
            found = bundle.rank_of_exit(ended, folder, is_local=True)
            if ended.failed or found.caught:
                kept.append((time.monotonic(), to_json(_short(found))))

    def for_row(self) -> list[dict[str, Any]]:
        """What goes along with the beats now."""
        now = time.monotonic()
        return [value for kept in self._kept.values() for at, value in kept if now - at < KEEP_S]


def _short(rank: Rank) -> Rank:
    record = rank.record
    if record is not None:
        record = replace(
            record, calls=record.calls[-_CALLS:], noted=record.noted[-_NOTES:], checks=(), checked=()
        )
    return replace(rank, record=record, crash=rank.crash[:_STACKS])


def rank_of(ended: RankExit, job: Job, nodes: Mapping[int, NodeInfo], row: Rank | None) -> Rank:
    """A rank that has ended: from its record here, from what its node sent, else from its last row."""
    if ended.node_rank == job.node_rank:
        return bundle.rank_of_exit(ended, job.record_dir, is_local=True)
    info = nodes.get(ended.node_rank)
    sent = info.row.get("ended", ()) if info is not None else ()
    found = next((from_json(Rank, v) for v in sent if v.get("rank", 0) == ended.rank), None)
    if found is not None and found.pid == ended.pid:
        return found
    known = bundle.rank_of_exit(ended, None, is_local=False)
    return replace(known, record=row.record) if row is not None else known


def node_sent(nodes: Mapping[int, NodeInfo]) -> dict[int, Node]:
    """What nodes said of themselves beside the remains of a rank: their memory and /dev/shm."""
    return {n: from_json(Node, info.row["node"]) for n, info in nodes.items() if info.row.get("node")}
