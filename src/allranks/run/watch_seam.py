"""What does the agent ask of a watcher, and what does it promise in return?

The agent makes one watcher per launch: `allranks.watch.make_watch() -> Watch` (no torch; absent or raising = the job
runs unwatched, said once). All methods are called from ONE thread that belongs to the watcher, so nothing needs a lock, and a
slow or raising watcher never holds the agent or the job; each call has the deadline named below, after which the agent goes on
without the answer. The watcher need not import this file (imports go down only): it only has to fit. Values are in
allranks.core.job.

Order of calls:  start -> (is_quiet, or row and tick) every 0.1 s, ended() for each exit, capture/on_bundle/on_verdict as messages come
-> on_exit() when the attempt ends badly -> start again after a restart ... -> close.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

from allranks.core.job import Job, NodeInfo, OnHang, RankExit, RankProcess

__all__ = ["Job", "NoWatch", "NodeInfo", "OnHang", "RankExit", "RankProcess", "Talk", "Verdict", "Watch"]


class Verdict(Protocol):
    """What the agent needs to know of a verdict: how to show it, and what to do."""

    @property
    def code(self) -> str:
        """The cause, "ARnnn"."""
        ...

    @property
    def action(self) -> Literal["report", "stop", "restart"]:
        """report: print it, the job goes on. stop: the job cannot go on (or --on-hang says so): end it on every node.
        restart: end it and start again if --max-restarts allows."""
        ...

    def text(self, *, color: bool = False) -> str:
        """Several lines for people, without a final line end."""
        ...

    def shown(self, *, color: bool = False) -> str:
        """What is printed now: the text, or what is new where it was shown a moment ago."""
        ...

    def to_json(self) -> dict[str, Any]:
        """Everything, for the other nodes' on_verdict, for --json and for run.json."""
        ...


class Talk(Protocol):
    """What a watcher may ask of the agent, from its thread; never blocks."""

    def ask(self, request: dict[str, Any], node_ranks: Sequence[int] | None = None) -> None:
        """Have capture(request) called on these nodes (None = all, this one too); answers come by on_bundle. Hub only."""
        ...

    def event(self, record: dict[str, Any]) -> None:
        """Append one line to RUN/events.jsonl."""
        ...


class Watch(Protocol):
    """The watcher of one node."""

    def start(self, job: Job, talk: Talk) -> None:
        """The ranks of an attempt have been started (their scripts may not have begun). Deadline 1 s."""
        ...

    def is_quiet(self, nodes: Mapping[int, NodeInfo]) -> bool:
        """Every 0.1 s: whether the row of before still does, and a tick would find nothing. Then neither is asked for."""
        ...

    def row(self) -> dict[str, Any]:
        """A small JSON value about the local ranks; each beat (250 ms) carries it to the hub. Aim for < 2 kB."""
        ...

    def tick(self, nodes: Mapping[int, NodeInfo]) -> Sequence[Verdict]:
        """Right after row(). On the hub `nodes` holds all nodes with their newest rows; elsewhere this node and
        what this agent knows of the hub (is_lost). Verdicts given back on the hub go to every node and are printed there once;
        elsewhere they are printed only if the hub is lost."""
        ...

    def ended(self, exit: RankExit) -> None:
        """A rank has ended (cleanly too); on the hub also ranks of other nodes."""
        ...

    def on_exit(self, exits: Sequence[RankExit], nodes: Mapping[int, NodeInfo]) -> Verdict | None:
        """Hub only, once per attempt that ends badly: all exits known 0.3 s after the first failure (up to 1.2 s where what it
        left is on another node), `nodes` as in tick(), survivors still alive (so their evidence can be taken). The text given back is
        printed in place of the agent's own story; None = the story. Deadline 0.7 s. Not called for what the user asked for (Ctrl-C,
        a forwarded signal)."""
        ...

    def last_look(self) -> Sequence[Verdict] | None:
        """Hub only, when every rank has ended well: what is still to be said, while their records are there; None: other
        nodes are asked, and the next ticks tell. Deadline 1.2 s."""
        ...

    def capture(self, request: dict[str, Any]) -> dict[str, Any]:
        """Take evidence on this node; the answer goes to the hub's on_bundle. Deadline 1 s."""
        ...

    def on_bundle(self, node_rank: int, bundle: dict[str, Any]) -> None:
        """An answer to Talk.ask (empty if that node's watcher failed or was late)."""
        ...

    def on_verdict(self, verdict: dict[str, Any]) -> None:
        """A verdict that the hub has made (its to_json), on every other node: write it to the run directory."""
        ...

    def close(self) -> None:
        """The launcher ends; leave no thread, file or process behind. Deadline 0.5 s."""
        ...


class NoWatch:
    """The watcher of a job that is not watched (--no-watch)."""

    def start(self, job: Job, talk: Talk) -> None:
        pass

    def is_quiet(self, nodes: Mapping[int, NodeInfo]) -> bool:
        return True

    def row(self) -> dict[str, Any]:
        return {}

    def tick(self, nodes: Mapping[int, NodeInfo]) -> Sequence[Verdict]:
        return ()

    def ended(self, exit: RankExit) -> None:
        pass

    def on_exit(self, exits: Sequence[RankExit], nodes: Mapping[int, NodeInfo]) -> Verdict | None:
        return None

    def last_look(self) -> Sequence[Verdict] | None:
        return ()

    def capture(self, request: dict[str, Any]) -> dict[str, Any]:
        return {}

    def on_bundle(self, node_rank: int, bundle: dict[str, Any]) -> None:
        pass

    def on_verdict(self, verdict: dict[str, Any]) -> None:
        pass

    def close(self) -> None:
        pass
