"""What happens next in the job? The hub decides, for all nodes at once.

    gather --(enough nodes)--> run --(a rank failed)--> judge --(story told)--> stop --> pause --> gather ...
                                |  \\--(a node lost, a verdict that stops)----->  |
                                \\--(all ranks ended)--> ended  <-----------------/

It lives in the agent of the node where the nodes meet, and talks to every agent, its own too, by links. It has no
processes and no terminal: it says what to do and what to print.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from allranks.core.errors import StartError
from allranks.core.job import RankExit
from allranks.run import endings, restarts, roster, story
from allranks.run.attempt import HUNG_S, REMAINS_S, Attempt, farthest_step
from allranks.run.endings import EXIT_MACHINE
from allranks.run.members import Members, Node
from allranks.run.options import Options
from allranks.run.roster import Hello
from allranks.run.story import Story
from allranks.run.watch_seam import Verdict
from allranks.run.watching import Watching
from allranks.run.wire import Link, Message

ON_EXIT_S = 0.7
SAY_EVERY_S = 10.0
SAY_FIRST_S = 1.5
"""The first word about who is missing comes sooner."""
JOIN_TIMEOUT_S = 600.0
LAST_CALL_S = 30.0
"""torch elastic's default."""
STOP_LIMIT_S = 6.0
"""A node that has not stopped its ranks by then is not waited for."""

Phase = Literal["gather", "run", "judge", "stop", "pause", "ended"]


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
        self.members = Members(own, where, options.silence_s, options.local_addr)
        self.phase: Phase = "gather"
        self.attempt: Attempt | None = None
        self.failures: list[restarts.Failure] = []
        self.asked_to_stop = 0
        """The signal by which the user or the scheduler asked for the end."""
        self.is_preempted = False
        self._phase_at = self._gathering_since = now
        self._said_at = now - SAY_EVERY_S + SAY_FIRST_S
        self._enough_since: float | None = None
        self._pause_s = 0.0
        self._exit_code = 0

    # -- what the agent calls ------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Read all links, look for lost nodes, move on."""
        self._greet(now)
        for node, message in self.members.read(now):
            self._take(node, message, now)
        for node in self.members.newly_lost(now):
            self._take_loss(node, now)
        self.members.beat(now)
        self._collect_verdicts(now)
        if self.attempt is not None and self.phase in ("run", "judge"):
            self.watching.nodes = self.members.infos(self.attempt.nodes, self.watching.row, now)
        getattr(self, f"_in_{self.phase}")(now)

    def fail_to_start(self, error: StartError) -> None:
        """A node's preflight or rank start failed: the job ends with that on every node."""
        self._end(EXIT_MACHINE, str(error), code=error.code)

    # -- links ---------------------------------------------------------------------------------------------------------

    def _greet(self, now: float) -> None:
        admitted, refused = self.members.greet(self.job_id, now)
        for error in refused:
            self.members.own.link.send(
                {"kind": "say", "text": f"a node was refused: {error.code} {error.what}"}
            )
        for node in admitted:
            self.event("node", host=node.hello.host, address=node.address)
            if self.phase not in ("gather", "pause"):
                node.link.send(
                    {"kind": "say", "text": "the job is running; this node is taken in at the next restart"}
                )
                self._say(f"host {node.hello.host} has come; it is taken in at the next restart")

    def _take(self, node: Node, message: Message, now: float) -> None:
        kind = message["kind"]
        if kind == "exit" and self.attempt and message["restart"] == self.attempt.restart:
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
        expected = exit.by_us or (self.asked_to_stop and endings.as_asked(exit, self.asked_to_stop))
        if exit.failed and not expected and self.phase == "run":
            self.attempt.failed_at = now
            self._enter("judge", now)

    def _take_signal(self, sender: Node, message: Message) -> None:
        number = int(message["number"])
        if message.get("ends"):
            self.asked_to_stop = number
        self.is_preempted = self.is_preempted or bool(message.get("preempts"))
        self.event("signal", number=number, host=sender.hello.host)
        for node in self.members.nodes:
            if node is not sender:
                node.link.send({**message, "kind": "signalled", "host": sender.hello.host})
        if self.phase in ("gather", "pause") and message.get("ends"):
            self._end(128 + number, "")

    def _take_loss(self, node: Node, now: float) -> None:
        self.event("node-lost", host=node.hello.host, why=node.lost_why)
        if self.attempt is None or node not in self.attempt.nodes or self.phase in ("gather", "pause"):
            self._forget(node)
        elif self.phase == "run" and not self._all_ended(node):
            self.attempt.failed_at = now
            self._enter("judge", now)

    def _forget(self, node: Node) -> None:
        self.members.forget(node)
        if self.phase in ("gather", "pause"):  # else a story has told it
            self._say(f"host {node.hello.host} is gone: {node.lost_why}")

    def _all_ended(self, node: Node) -> bool:
        assert self.attempt is not None
        return node.seat is not None and all(r in self.attempt.exits for r in node.seat.ranks)

    def _collect_verdicts(self, now: float) -> None:
        while not self.watching.verdicts.empty():
            verdict = self.watching.verdicts.get()
            if self.phase not in ("run", "judge") or self.attempt is None:
                continue
            values, text = verdict.to_json(), verdict.text()
            if verdict.action == "report":
                self.members.broadcast("verdict", text=text, color_text=verdict.text(color=True), json=values)
                self.event("verdict", code=verdict.code, text=text)
                self.attempt.note(values, self.watching.nodes)
                continue
            told = self._story(self.attempt) if self.attempt.is_broken else Story(verdict.code, "", 1, None)
            self._tell_verdict(told, verdict, now)

    # -- phases --------------------------------------------------------------------------------------------------------

    def _enter(self, phase: Phase, now: float) -> None:
        self.phase, self._phase_at, self._said_at = phase, now, now
        if phase == "gather":
            self._said_at = now - SAY_EVERY_S + SAY_FIRST_S

    def _in_gather(self, now: float) -> None:
        present = self.members.present
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
                "AR310",
                f"only {len(present)} of {self.options.max_nodes} nodes came within {limit:.0f} s",
                why=roster.attendance(hellos, self.options, waited, self.where),
                fix="start the missing nodes, or --rdzv-conf join_timeout=SECONDS for longer, or --nnodes MIN:MAX for fewer",
            )
            self._end(EXIT_MACHINE, str(error), code="AR310")

    def _begin(self, nodes: list[Node], now: float) -> None:
        before = [n.hello.host for n in self.attempt.nodes] if self.attempt else []
        placed = roster.seats([n.hello for n in nodes], before)
        by_hello = {id(n.hello): n for n in nodes}
        ordered = [by_hello[id(seat.hello)] for seat in placed]
        for node, seat in zip(ordered, placed, strict=True):
            node.begin(seat, len(self.failures))
        world_size = sum(seat.hello.nproc for seat in placed)
        self.attempt = Attempt(len(self.failures), ordered, world_size, now)
        self.watching.nodes = self.members.infos(ordered, {}, now)
        while not self.watching.verdicts.empty():  # of the attempt before
            self.watching.verdicts.get()
        for text in roster.version_differences([n.hello for n in ordered]) if not self.failures else ():
            self._say(f"warning: {text}")
        addr, port = self._master(ordered[0])
        listed = self.attempt.listing(self.members)
        for node in ordered:
            node.link.send(
                {
                    "kind": "start",
                    "job_id": self.job_id,
                    **self.attempt.orders(node, listed, self.members),
                    "master_addr": addr,
                    "master_port": port,
                    "run_dir": str(self.run_dir),
                }
            )
        self.event("start", restart=self.attempt.restart, world_size=world_size, nodes=listed)
        self.describe(world_size=world_size, nodes=listed, restarts=self.attempt.restart)
        self._enter("run", now)

    def _in_run(self, now: float) -> None:
        attempt = self._current()
        if len(attempt.exits) == attempt.world_size and attempt.is_heard_out(self.watching, now):
            self._finish(now)
        elif self.asked_to_stop and (left := attempt.left()):
            if code := attempt.hung(self.watching.nodes, now):
                self._say(f"{code}: nothing has moved for {HUNG_S:.0f} s; killed: {left}")
                self.members.broadcast("signalled", number=self.asked_to_stop, kills=True)
            elif now - self._said_at >= SAY_EVERY_S:
                self._said_at = now
                self._say(f"waiting for {left} to end; send the signal again to kill them")

    def _in_judge(self, now: float) -> None:
        """A failure is known: listen a moment for others, ask the watcher, tell the story, stop everything."""
        attempt = self._current()
        since = now - attempt.failed_at
        own = self.members.own.seat.node_rank if self.members.own.seat else 0
        if attempt.answer is None and attempt.is_heard(own, self.watching.nodes, now):
            exits = sorted(attempt.exits.values(), key=lambda e: e.when)
            attempt.answer = self.watching.on_exit(exits)
        if attempt.answer is None or not (attempt.answer.is_there or since >= REMAINS_S + ON_EXIT_S):
            return
        told = self._story(attempt)
        verdict = attempt.answer.value
        if verdict is None:
            self._tell(told, now)
            return
        self._tell_verdict(told, verdict, now)

    def _tell_verdict(self, told: Story, verdict: Verdict, now: float) -> None:
        whole = told.with_verdict(verdict.code, verdict.text())
        self._tell(whole, now, (verdict.shown(), verdict.shown(color=True)), verdict.to_json())

    def _story(self, attempt: Attempt) -> Story:
        if attempt.lost and not attempt.failed:
            return endings.story_of_lost(attempt.lost)
        return story.tell(list(attempt.exits.values()), attempt.world_size, logs=str(self.run_dir / "ranks"))

    def _tell(
        self,
        told: Story,
        now: float,
        texts: tuple[str, str] | None = None,
        values: dict[str, Any] | None = None,
    ) -> None:
        """Print the story (or these texts, plain and in colour) on every node, and end the ranks that are left."""
        attempt = self._current()
        attempt.story = told
        attempt.step = farthest_step(self.watching.nodes)
        attempt.failed_at = attempt.failed_at or now
        shown = values if values is not None else told.to_json()
        text, color_text = texts or (told.text, told.text)
        is_verdict = values is not None
        self.members.broadcast("story", text=text, color_text=color_text, json=shown, is_verdict=is_verdict)
        self.event("verdict", code=told.code, text=told.text)
        self.members.broadcast("stop", since=now - attempt.failed_at)
        self._enter("stop", now)

    def _in_stop(self, now: float) -> None:
        attempt = self._current()
        waiting = [n for n in attempt.nodes if not n.stopped and not n.lost_why]
        if waiting and now - self._phase_at < STOP_LIMIT_S:
            return
        self.watching.pause()
        for node in [n for n in self.members.nodes if n.lost_why]:
            self._forget(node)
        self._decide(attempt, now)

    def _decide(self, attempt: Attempt, now: float) -> None:
        told = attempt.story
        assert told is not None
        self.failures.append(restarts.failure_of(told, attempt.exits.values(), attempt.step))
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
        unasked = [e for e in failed if not endings.as_asked(e, self.asked_to_stop)]
        if unasked:
            self.members.broadcast("story", text=told.text, color_text=told.text, json=told.to_json())
        code = told.exit_code if told.culprit is not None else 128 + (self.asked_to_stop or 9)
        self._end(code, "" if unasked else endings.stopped_text(failed, self.asked_to_stop))

    def _end(self, exit_code: int, text: str, *, code: str = "") -> None:
        self._exit_code = exit_code
        self.event("stop", exit_code=exit_code, text=text, code=code)
        exits = sorted(self.attempt.exits.values(), key=lambda e: e.rank) if self.attempt else []
        codes = {str(e.rank): -e.signal if e.signal is not None else e.code for e in exits}
        self.describe(exit_code=exit_code, exit_codes=codes, cause=code or None)
        preempted = self.is_preempted and exit_code in (0, self.options.requeue_exit_code)
        self.members.broadcast("end", exit_code=exit_code, text=text, preempted=preempted)
        self._enter("ended", time.monotonic())

    def _in_ended(self, now: float) -> None:
        pass

    # -- small things --------------------------------------------------------------------------------------------------

    def _current(self) -> Attempt:
        assert self.attempt is not None
        return self.attempt

    def _say(self, text: str) -> None:
        self.members.broadcast("say", text=text)

    def _master(self, first: Node) -> tuple[str, int]:
        """MASTER_ADDR and MASTER_PORT: a port of this attempt's own, where rank 0 is."""
        port = first.hello.free_port
        if self.options.max_nodes == 1:
            fixed = self.options.port if not self.failures else None
            return self.options.host or "127.0.0.1", fixed or port
        return self.members.address(first) or self.options.host, port
