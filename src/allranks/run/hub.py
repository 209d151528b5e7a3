"""What happens next in the job? The hub decides, for all nodes at once.

    gather --(enough nodes)--> run --(a rank failed)--> judge --(story told)--> stop --> pause --> gather ...
                                |  \\--(a node lost, a verdict that stops)----->  |
                                \\--(all ranks ended)--> ended  <-----------------/

It lives in the agent of the node where the nodes meet, and talks to every agent, its own too, by links. It has no
processes and no terminal: it says what to do and what to print.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from allranks.core.errors import StartError
from allranks.core.job import NodeInfo, RankExit
from allranks.run import restarts, roster, story
from allranks.run.options import Options
from allranks.run.roster import Hello, Seat
from allranks.run.story import Story
from allranks.run.watching import Answer, Watching
from allranks.run.wire import Link, Message

SETTLE_S = 0.3
"""How long to listen for other failures after the first: the culprit's exit may arrive after a victim's."""
ON_EXIT_S = 0.7
SAY_EVERY_S = 10.0
BEAT_S = 0.25
JOIN_TIMEOUT_S = 600.0
LAST_CALL_S = 30.0
"""torch elastic's default."""
STOP_LIMIT_S = 6.0
"""A node that has not stopped its ranks by then is not waited for."""
EXIT_MACHINE = 3

Phase = Literal["gather", "run", "judge", "stop", "pause", "ended"]


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
    failed_at: float = 0.0


class Hub:
    """The deciding half of one agent.

    Args:
        options: As given on this node.
        job_id: The random id of the job.
        run_dir: The run directory, named by this node.
        where: host:port of the meeting point, for messages.
        own: The link to this node's agent (the hub's end), and its hello.
        watching: This node's watcher.
        event: Writes to events.jsonl.
        describe: Writes to run.json.
    """

    def __init__(
        self,
        options: Options,
        *,
        job_id: str,
        run_dir: Path,
        where: str,
        own: tuple[Link, Hello],
        watching: Watching,
        event: Callable[..., None],
        describe: Callable[..., None],
    ) -> None:
        self.options, self.job_id, self.run_dir, self.where = options, job_id, run_dir, where
        self.watching, self.event, self.describe = watching, event, describe
        now = time.monotonic()
        self.nodes: list[Node] = [Node(own[0], own[1], now)]
        self.strangers: list[tuple[Link, str, str]] = []
        """Links that have not said hello, with the peer's address and ours."""
        self.phase: Phase = "gather"
        self.attempt: Attempt | None = None
        self.failures: list[restarts.Failure] = []
        self.asked_to_stop = 0
        """The signal by which the user or the scheduler asked for the end."""
        self.is_preempted = False
        self.own_address = options.local_addr
        self._phase_at = self._gathering_since = now
        self._said_at = now
        self._enough_since: float | None = None
        self._next_beat = 0.0
        self._pause_s = 0.0
        self._exit_code = 0
        self._waiting_said: set[str] = set()

    # -- what the agent calls ------------------------------------------------------------------------------------------

    def welcome(self, link: Link, peer_address: str, our_address: str) -> None:
        """A connection has come in; it becomes a node when it says hello."""
        self.strangers.append((link, peer_address, our_address))

    def tick(self, now: float) -> None:
        """Read all links, look for lost nodes, move on."""
        self._greet(now)
        for node in list(self.nodes):
            for message in node.link.receive():
                self._take(node, message, now)
        self._look_for_lost(now)
        if now >= self._next_beat:
            self._next_beat = now + BEAT_S
            for node in self.nodes[1:]:
                node.link.send({"kind": "beat"})
        self._collect_verdicts(now)
        self.watching.nodes = self._node_infos(now)
        getattr(self, f"_in_{self.phase}")(now)

    def fail_to_start(self, error: StartError) -> None:
        """A node's preflight or rank start failed: the job ends with that on every node."""
        self._end(EXIT_MACHINE, str(error), code=error.code)

    # -- links ---------------------------------------------------------------------------------------------------------

    def _greet(self, now: float) -> None:
        waiting = []
        for link, peer, ours in self.strangers:
            messages = link.receive()
            hello = next((Hello.from_json(m) for m in messages if m["kind"] == "hello"), None)
            if link.closed or (not hello and messages) or now - link.heard_at > 10:
                link.close("no hello")
            elif hello:
                self._admit(Node(link, hello, now, hello.local_addr or peer), ours)
            else:
                waiting.append((link, peer, ours))
        self.strangers = waiting

    def _admit(self, node: Node, our_address: str) -> None:
        own = self.nodes[0].hello
        error = roster.refusal(node.hello, own, [n.hello for n in self.nodes if not n.lost_why], self.where)
        if error is not None:
            refused = {
                "code": error.code,
                "what": error.what,
                "why": error.why,
                "fix": error.fix,
                "where": error.where,
            }
            node.link.send({"kind": "refuse", **refused})
            self._tell_own("say", text=f"a node was refused: {error.code} {error.what}")
            return
        self.own_address = self.own_address or our_address
        self.nodes.append(node)
        node.link.send({"kind": "welcome", "job_id": self.job_id, "hub": own.host})
        self.event("node", host=node.hello.host, address=node.address)
        if self.phase != "gather":
            text = (
                f"the job is running on {self._num_seated()} nodes; this node is taken in at the next restart"
            )
            node.link.send({"kind": "say", "text": text})
            self._say(f"host {node.hello.host} has come; it is taken in at the next restart")

    def _take(self, node: Node, message: Message, now: float) -> None:
        kind = message["kind"]
        if kind == "beat":
            node.row, node.row_at = message.get("row") or {}, now
        elif kind == "exit" and self.attempt and message["restart"] == self.attempt.restart:
            self._take_exit(message, now)
        elif kind == "stopped":
            node.stopped = True
            node.hello = (
                Hello.from_json({**node.hello.to_json(), "free_port": message["free_port"]}) or node.hello
            )
        elif kind == "signal":
            self._take_signal(node, message)
        elif kind == "bundle":
            self.watching.on_bundle(node.seat.node_rank if node.seat else 0, message.get("bundle") or {})
        elif kind == "failed":
            error = StartError(
                message["code"],
                message["what"],
                why=message["why"],
                fix=message["fix"],
                where=message["where"],
            )
            self.fail_to_start(error)

    def _take_exit(self, message: Message, now: float) -> None:
        assert self.attempt is not None
        values = {k: v for k, v in message.items() if k not in ("kind", "restart")}
        exit = RankExit(**{**values, "last_lines": tuple(values["last_lines"])})
        self.attempt.exits[exit.rank] = exit
        self.watching.ended(exit)
        if exit.failed and not exit.by_us and self.phase == "run" and not self.asked_to_stop:
            self.attempt.failed_at = now
            self._enter("judge", now)

    def _take_signal(self, sender: Node, message: Message) -> None:
        number = int(message["number"])
        if message.get("ends"):
            self.asked_to_stop = number
        self.is_preempted = self.is_preempted or bool(message.get("preempts"))
        self.event("signal", number=number, host=sender.hello.host)
        for node in self.nodes:
            if node is not sender:
                node.link.send({**message, "kind": "signalled", "host": sender.hello.host})
        if self.phase in ("gather", "pause") and message.get("ends"):
            self._end(128 + number, "")

    def _look_for_lost(self, now: float) -> None:
        for node in list(self.nodes[1:]):
            silent = now - node.link.heard_at
            why = node.link.closed or (
                f"silent for {silent:.1f} s" if silent > self.options.silence_s else ""
            )
            if not why or node.lost_why:
                continue
            node.lost_why = why
            self.event("node-lost", host=node.hello.host, why=why)
            if self.attempt is None or node not in self.attempt.nodes or self.phase in ("gather", "pause"):
                self._forget(node)
            elif self.phase == "run" and not self._all_ended(node):
                self.attempt.failed_at = now
                self._enter("judge", now)

    def _forget(self, node: Node) -> None:
        node.link.close()
        self.nodes.remove(node)
        self._say(f"host {node.hello.host} is gone: {node.lost_why}")

    def _all_ended(self, node: Node) -> bool:
        assert self.attempt is not None
        return node.seat is not None and all(r in self.attempt.exits for r in node.seat.ranks)

    def _collect_verdicts(self, now: float) -> None:
        while not self.watching.verdicts.empty():
            verdict = self.watching.verdicts.get()
            if self.phase not in ("run", "judge") or self.attempt is None:
                continue
            values = verdict.to_json()
            if verdict.action == "report":
                self._broadcast(
                    "verdict", text=verdict.text(), color_text=verdict.text(color=True), json=values
                )
                self.event("verdict", code=verdict.code, text=verdict.text())
                continue
            told = Story(verdict.code, verdict.text(), 1, None, by_script=verdict.action == "stop")
            self._tell(told, now, color_text=verdict.text(color=True), values=values)

    # -- phases --------------------------------------------------------------------------------------------------------

    def _enter(self, phase: Phase, now: float) -> None:
        self.phase, self._phase_at, self._said_at = phase, now, now

    def _in_gather(self, now: float) -> None:
        present = [n for n in self.nodes if not n.lost_why]
        hellos = [n.hello for n in present]
        low, high = self.options.min_nodes, self.options.max_nodes
        if len(present) < low:
            self._enough_since = None
        elif self._enough_since is None:
            self._enough_since = now
        last_call = (
            float(self.options.conf.get("last_call_timeout", LAST_CALL_S)) if not self.failures else 1.0
        )
        if len(present) >= high or (self._enough_since is not None and now - self._enough_since >= last_call):
            self._begin(present[:high], now)
            return
        waited = now - self._gathering_since
        if now - self._said_at >= SAY_EVERY_S:
            self._said_at = now
            self._say(roster.attendance(hellos, self.options, waited, self.where))
        limit = float(self.options.conf.get("join_timeout", self.options.conf.get("timeout", JOIN_TIMEOUT_S)))
        if waited > limit:
            error = StartError(
                "AR300",
                f"only {len(present)} of {self.options.max_nodes} nodes came within {limit:.0f} s",
                why=roster.attendance(hellos, self.options, waited, self.where),
                fix="start the missing nodes, or --rdzv-conf join_timeout=SECONDS for longer, or --nnodes MIN:MAX for fewer",
            )
            self._end(EXIT_MACHINE, str(error), code="AR300")

    def _begin(self, nodes: list[Node], now: float) -> None:
        before = [n.hello.host for n in self.attempt.nodes] if self.attempt else []
        placed = roster.seats([n.hello for n in nodes], before)
        by_hello = {id(n.hello): n for n in nodes}
        ordered = [by_hello[id(seat.hello)] for seat in placed]
        for node, seat in zip(ordered, placed, strict=True):
            node.seat, node.stopped, node.row = seat, False, {}
        world_size = sum(seat.hello.nproc for seat in placed)
        self.attempt = Attempt(len(self.failures), ordered, world_size, now)
        for text in roster.version_differences([n.hello for n in ordered]) if not self.failures else ():
            self._say(f"warning: {text}")
        addr, port = self._master(ordered[0])
        listed = [
            {"host": n.hello.host, "address": self._address(n), "ranks": list(s.ranks)}
            for n, s in zip(ordered, placed, strict=True)
        ]
        for node, seat in zip(ordered, placed, strict=True):
            node.link.send(
                {
                    "kind": "start",
                    "job_id": self.job_id,
                    "restart": self.attempt.restart,
                    "node_rank": seat.node_rank,
                    "first_rank": seat.first_rank,
                    "world_size": world_size,
                    "nodes": listed,
                    "master_addr": addr,
                    "master_port": port,
                    "run_dir": str(self.run_dir),
                    "address": self._address(node),
                }
            )
        self.event("start", restart=self.attempt.restart, world_size=world_size, nodes=listed)
        self.describe(world_size=world_size, nodes=listed, restarts=self.attempt.restart)
        self._enter("run", now)

    def _in_run(self, now: float) -> None:
        attempt = self._current()
        if len(attempt.exits) == attempt.world_size:
            self._finish(now)
        elif self.asked_to_stop and now - self._said_at >= SAY_EVERY_S:
            self._said_at = now
            left = sorted(set(range(attempt.world_size)) - set(attempt.exits))
            self._say(
                f"waiting for ranks {', '.join(map(str, left[:16]))} to end; send the signal again to kill them"
            )

    def _in_judge(self, now: float) -> None:
        """A failure is known: listen a moment for others, ask the watcher, tell the story, stop everything."""
        attempt = self._current()
        since = now - attempt.failed_at
        everyone = len(attempt.exits) == attempt.world_size
        if attempt.answer is None and (since >= SETTLE_S or everyone):
            exits = sorted(attempt.exits.values(), key=lambda e: e.when)
            attempt.answer = self.watching.on_exit(exits)
        if attempt.answer is None or not (attempt.answer.is_there or since >= SETTLE_S + ON_EXIT_S):
            return
        told = self._story(attempt)
        verdict = attempt.answer.value
        if verdict is None:
            self._tell(told, now)
            return
        told = Story(
            verdict.code, verdict.text(), told.exit_code, told.culprit, told.identity, told.by_script
        )
        self._tell(told, now, color_text=verdict.text(color=True), values=verdict.to_json())

    def _story(self, attempt: Attempt) -> Story:
        failed = [e for e in attempt.exits.values() if e.failed and not e.by_us]
        lost = [n for n in attempt.nodes if n.lost_why]
        if lost and not failed:
            return _story_of_lost(lost, attempt)
        return story.tell(list(attempt.exits.values()), attempt.world_size, logs=str(self.run_dir / "ranks"))

    def _tell(
        self, told: Story, now: float, *, color_text: str = "", values: dict[str, Any] | None = None
    ) -> None:
        """Print the story on every node, and end the ranks that are left."""
        attempt = self._current()
        attempt.story = told
        attempt.failed_at = attempt.failed_at or now
        shown = values if values is not None else told.to_json()
        self._broadcast("story", text=told.text, color_text=color_text or told.text, json=shown)
        self.event("verdict", code=told.code, text=told.text)
        self._broadcast("stop", since=now - attempt.failed_at)
        self._enter("stop", now)

    def _in_stop(self, now: float) -> None:
        attempt = self._current()
        waiting = [n for n in attempt.nodes if not n.stopped and not n.lost_why]
        if waiting and now - self._phase_at < STOP_LIMIT_S:
            return
        self.watching.pause()
        for node in [n for n in self.nodes if n.lost_why]:
            self._forget(node)
        self._decide(attempt, now)

    def _decide(self, attempt: Attempt, now: float) -> None:
        told = attempt.story
        assert told is not None
        step = max(
            (int(n.row["step"]) for n in attempt.nodes if isinstance(n.row.get("step"), int)), default=None
        )
        self.failures.append(restarts.Failure(told.by_script, told.identity, step))
        exits = [
            {"rank": e.rank, "code": e.code, "signal": e.signal, "by_us": e.by_us}
            for e in attempt.exits.values()
        ]
        self.event("end-of-attempt", restart=attempt.restart, exits=exits, code=told.code)
        decision = restarts.decide(self.failures, self.options.max_restarts)
        if self.asked_to_stop or not decision.restart:
            self._end(told.exit_code, decision.said, code=told.code)
            return
        self._say(decision.said)
        self.event("restart", wait_s=decision.wait_s, said=decision.said)
        self._pause_s = decision.wait_s
        self._enter("pause", now)

    def _in_pause(self, now: float) -> None:
        if now - self._phase_at >= self._pause_s:
            self._gathering_since, self._enough_since = now, None
            self._enter("gather", now)

    def _finish(self, now: float) -> None:
        """Every rank has ended and no failure was judged: well, or as the user asked."""
        attempt = self._current()
        failed = [e for e in attempt.exits.values() if e.failed]
        if not failed:
            requeue = self.is_preempted and self.options.requeue_exit_code is not None
            self._end(self.options.requeue_exit_code or 0 if requeue else 0, "")
            return
        told = self._story(attempt)
        unasked = [e for e in failed if not _as_asked(e, self.asked_to_stop)]
        if unasked:
            self._broadcast("story", text=told.text, color_text=told.text, json=told.to_json())
        code = told.exit_code if told.culprit is not None else 128 + (self.asked_to_stop or 9)
        self._end(code, "" if unasked else _stopped_text(failed, self.asked_to_stop))

    def _end(self, exit_code: int, text: str, *, code: str = "") -> None:
        self._exit_code = exit_code
        self.event("stop", exit_code=exit_code, text=text, code=code)
        exits = sorted(self.attempt.exits.values(), key=lambda e: e.rank) if self.attempt else []
        codes = {str(e.rank): -e.signal if e.signal is not None else e.code for e in exits}
        self.describe(exit_code=exit_code, exit_codes=codes, cause=code or None)
        preempted = self.is_preempted and exit_code in (0, self.options.requeue_exit_code)
        self._broadcast("end", exit_code=exit_code, text=text, preempted=preempted)
        self._enter("ended", time.monotonic())

    def _in_ended(self, now: float) -> None:
        pass

    # -- small things --------------------------------------------------------------------------------------------------

    def _current(self) -> Attempt:
        assert self.attempt is not None
        return self.attempt

    def _broadcast(self, kind: str, **fields: Any) -> None:
        for node in self.nodes:
            node.link.send({"kind": kind, **fields})

    def _say(self, text: str) -> None:
        self._broadcast("say", text=text)

    def _tell_own(self, kind: str, **fields: Any) -> None:
        self.nodes[0].link.send({"kind": kind, **fields})

    def _num_seated(self) -> int:
        return len(self.attempt.nodes) if self.attempt else 0

    def _address(self, node: Node) -> str:
        return node.address if node is not self.nodes[0] else self.own_address

    def _master(self, first: Node) -> tuple[str, int]:
        """MASTER_ADDR and MASTER_PORT: a port of this attempt's own, where rank 0 is."""
        port = first.hello.free_port
        if self.options.max_nodes == 1:
            fixed = self.options.port if not self.failures else None
            return self.options.host or "127.0.0.1", fixed or port
        return self._address(first) or self.options.host, port

    def _node_infos(self, now: float) -> dict[int, NodeInfo]:
        if self.attempt is None:
            return {}
        return {
            n.seat.node_rank: NodeInfo(
                node_rank=n.seat.node_rank,
                host=n.hello.host,
                ranks=n.seat.ranks,
                row=n.row if n is not self.nodes[0] else self.watching.row,
                age_s=now - n.row_at if n is not self.nodes[0] and n.row_at else 0.0,
                is_lost=bool(n.lost_why),
                lost_why=n.lost_why,
                address=self._address(n),
            )
            for n in self.attempt.nodes
            if n.seat is not None
        }


def _story_of_lost(lost: list[Node], attempt: Attempt) -> Story:
    lines = []
    for node in lost:
        ranks = node.seat.ranks if node.seat else ()
        names = (
            f"ranks {ranks[0]}-{ranks[-1]}" if len(ranks) > 1 else f"rank {ranks[0]}" if ranks else "no rank"
        )
        at = f" ({node.address})" if node.address else ""
        number = node.seat.node_rank if node.seat else "?"
        lines.append(
            f"AR320 node {number} = host {node.hello.host}{at} with {names} is lost: {node.lost_why}"
        )
    lines.append(
        "  why:   closed = its agent ended or was killed; silent = power, network or a frozen machine"
    )
    lines.append("  more:  allranks explain AR320")
    return Story("AR320", "\n".join(lines), EXIT_MACHINE, None)


def _as_asked(exit: RankExit, number: int) -> bool:
    """Whether a rank ended as the forwarded signal makes a plain script end."""
    by_signal = exit.signal is not None and exit.signal in (number, 9)
    return exit.by_us or by_signal or exit.code in (128 + number, 130)


def _stopped_text(failed: list[RankExit], number: int) -> str:
    import signal

    names = ", ".join(str(e.rank) for e in sorted(failed, key=lambda e: e.rank)[:16])
    return f"stopped by {signal.Signals(number).name}; rank{'s' * (len(failed) > 1)} {names} ended by it"
