"""What runs on each node: the agent. It starts this node's ranks when the hub says so, reports what happens to them, forwards
signals, and leaves nothing behind.

One loop, no waiting but in its selector: signals, exits, messages from the hub (which lives in one of the agents), the watcher's word.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from allranks.run import network, preempt, processes
from allranks.run.endings import EXIT_MACHINE, cut_off_text
from allranks.run.environment import Place
from allranks.run.hub import Hub
from allranks.run.local import LocalRanks
from allranks.run.members import BEAT_S
from allranks.run.options import Options
from allranks.run.output import Console
from allranks.run.processes import Guard
from allranks.run.signals import ENDING, FORWARDED, PREEMPTING, Requests, Signals, nobody_reads
from allranks.run.watch_port import WatchPort
from allranks.run.watching import Answer, Watching
from allranks.run.wire import Link, Message, SocketLink, silence

LOOP_S, IDLE_S = 0.05, 0.2  # a signal, a message and the watcher wake it
OWN_VIEW_S = 0.5
"""How long a cut-off node waits for its own watcher's view."""
FAILURE_BUDGET_S = 1.5
"""From the first failure to SIGKILL, so that a rank that raises ends all within 2 s."""


class Agent:
    """One node of the job.

    Args:
        options: As given.
        env: The environment of the agent.
        num_cores: Cores this node may use.
        console: The terminal.
        link: To the hub.
        hub: The hub, if it lives here.
        server: The listening socket of the hub.
        watching: The watcher.
        wake_fd: Readable when the watcher has something.
        node_dir: This node's folder in shared memory.
    """

    def __init__(
        self,
        options: Options,
        env: Mapping[str, str],
        *,
        num_cores: int,
        console: Console,
        link: Link,
        hub: Hub | None,
        server: socket.socket | None,
        watching: Watching,
        wake_fd: int,
        node_dir: Path,
        guard: Guard,
    ) -> None:
        self.options, self.env, self.num_cores, self.console = options, env, num_cores, console
        self.link, self.hub, self.server, self.watching = link, hub, server, watching
        self.node_dir, self.guard, self._wake_fd = node_dir, guard, wake_fd
        self.local: LocalRanks | None = None
        self.exit_code: int | None = None
        self.preempted = False
        self._nodes: list[dict[str, Any]] = []
        self._hub_rank = 0
        self._hub_lost_at = 0.0
        self._next_beat = 0.0
        self._next_check = 0.0
        self._requests = Requests()
        self._captures: list[Answer] = []
        self._port = WatchPort(hub)
        self._reported_stop = True
        self._end: Message | None = None
        self._scheduled_stop = preempt.ScheduledStop(options, env, console.say)

    def run(self) -> int:
        """Until the job has ended here; gives back the launcher's exit code."""
        with Signals() as signals, selectors.DefaultSelector() as selector:
            selector.register(signals.fileno(), selectors.EVENT_READ)
            selector.register(self._wake_fd, selectors.EVENT_READ)
            while self.exit_code is None:
                self._wait(selector)
                now = time.monotonic()
                for number in signals.take():
                    self._take_signal(number, now)
                self._turn(now)
        return self.exit_code

    def _turn(self, now: float) -> None:
        """One turn of the loop: what has happened here, then what the hub says."""
        self._poll_ranks()
        self._port.send_asked()
        if self.hub is not None:
            self._accept()
            self.hub.tick(now)
        for message in self.link.receive():
            getattr(self, f"_on_{message['kind']}", self._on_unknown)(message)
        self._beat(now)
        self._drive_stop()
        self._check(now)
        self._look_at_hub(now)
        if self._end is not None and (self.local is None or self.local.all_ended):
            self._finish(self._end)

    def _wait(self, selector: selectors.BaseSelector) -> None:
        """Sleep until something happens, at most LOOP_S; IDLE_S or the next beat while ranks run."""
        sockets = [s for s in self._sockets() if s.fileno() >= 0]
        for sock in sockets:
            writing = isinstance(sock, SocketLink) and sock.is_writing
            selector.register(sock, selectors.EVENT_READ | (selectors.EVENT_WRITE if writing else 0))
        is_idle = self.local is not None and self.local.stopping is None and not self._captures
        selector.select(min(IDLE_S, self._next_beat - time.monotonic()) if is_idle else LOOP_S)
        for sock in sockets:
            selector.unregister(sock)
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_fd, 4096)

    def _sockets(self) -> list[Any]:
        found: list[Any] = [self.link] if isinstance(self.link, SocketLink) else []
        if self.server is not None:
            found.append(self.server)
        if self.hub is not None:
            found += [n.link for n in self.hub.members.nodes if isinstance(n.link, SocketLink)]
            found += [s[0] for s in self.hub.members.strangers]
        return found

    def _accept(self) -> None:
        while self.server is not None and self.hub is not None:
            try:
                sock, _ = self.server.accept()
            except OSError:
                return
            link = SocketLink(sock)
            self.hub.members.welcome(link, link.peer_address(), link.local_address())

    # -- what happens here ---------------------------------------------------------------------------------------------

    def _poll_ranks(self) -> None:
        if self.local is None:
            return
        for exit in self.local.poll():
            self.link.send(
                {
                    "kind": "exit",
                    "restart": self.local.place.restart,
                    **{k: getattr(exit, k) for k in exit.__slots__},
                }
            )
            if self.hub is None:
                self.watching.ended(exit)
                self._next_beat = min(self._next_beat, time.monotonic() + 0.15)  # with what it left behind

    def _drive_stop(self) -> None:
        """Report to the hub once the ranks and all that came from them are gone."""
        local = self.local
        if local is None or self._reported_stop:
            return
        if local.stopping is None and local.all_ended:
            local.stop(self.options.grace_s)  # all ended by themselves: sweep up what they left
        if local.stopping is not None and local.stopping.drive():
            self._poll_ranks()
            self._reported_stop = True
            self.link.send({"kind": "stopped", "free_port": network.free_port()})
            if self.hub is None:
                self.watching.pause(keeps_row=True)

    def _beat(self, now: float) -> None:
        if now >= self._next_beat:
            self._next_beat = now + BEAT_S
            self.link.send({"kind": "beat", "row": self.watching.row})
        for answer in [a for a in self._captures if a.is_there]:
            self._captures.remove(answer)
            self.link.send({"kind": "bundle", "bundle": answer.value or {}})

    def _check(self, now: float) -> None:
        """Four times a second: is the guard alive, the terminal there, the scheduler's end near?"""
        if now < self._next_check:
            return
        self._next_check = now + 0.25
        self.guard.check()
        if self.local is not None:
            self.local.send_waiting()
        known = {r.pid for r in self.local.ranks} if self.local else set()
        processes.reap_adopted(known | ({self.guard.process.pid} if self.guard.process else set()))
        if nobody_reads() or self.console.reader_is_gone:
            self._terminal_gone()
        if self._scheduled_stop.strikes(time.time()):
            self.console.say(
                "allranks: the scheduler's end of the job is near (--stop-before): asking the ranks to save and end"
            )
            self._send_on(signal.SIGTERM, now)

    def _terminal_gone(self) -> None:
        if self.local is not None and self.local.stopping is None and not self.local.all_ended:
            self.link.send({"kind": "signal", "number": int(signal.SIGHUP), "ends": True})
            self.local.stop(min(1.0, self.options.grace_s))
        elif self.local is None and self._end is None:
            self.link.send({"kind": "signal", "number": int(signal.SIGHUP), "ends": True})
            self._end = {"exit_code": 128 + signal.SIGHUP, "text": ""}

    # -- signals -------------------------------------------------------------------------------------------------------

    def _take_signal(self, number: int, now: float) -> None:
        if number in FORWARDED:
            wanted = self._requests.judge(number, now)
            if wanted == "kill":
                self._kill_now(number)
            elif wanted == "pass on":
                self._send_on(number, now)
        elif number == signal.SIGWINCH and self.local is not None:
            self.local.output.window_changed()
        elif number == signal.SIGTSTP:
            if self.local is not None:
                self.local.pause()
            os.kill(os.getpid(), signal.SIGSTOP)
        elif number == signal.SIGCONT and self.local is not None:
            self.local.go_on()

    def _send_on(self, number: int, now: float) -> None:
        """To the ranks here, and by the hub to the other nodes."""
        preempts = number in PREEMPTING
        self.link.send(
            {"kind": "signal", "number": int(number), "ends": number in ENDING, "preempts": preempts}
        )
        if preempts:
            preempt.ask_to_stop(self.node_dir, signal.Signals(number).name)
        self._forward(number, now)
        if number == signal.SIGINT and self.local is not None and not self.local.all_ended:
            self.console.say("allranks: interrupted; waiting for the ranks to end (Ctrl-C again kills them)")

    def _forward(self, number: int, now: float) -> None:
        self._requests.passed_on_at[number] = now
        if self.local is not None:
            self.local.forward(number)

    def _kill_now(self, number: int) -> None:
        self.link.send({"kind": "signal", "number": int(number), "ends": True, "kills": True})
        if self.local is not None:
            self.local.kill()

    # -- messages ------------------------------------------------------------------------------------------------------

    def _on_unknown(self, message: Message) -> None:
        """A beat, or something of a newer version's."""

    def _on_say(self, message: Message) -> None:
        self.console.say(f"allranks: {message['text']}")

    def _on_welcome(self, message: Message) -> None:
        pass

    def _on_refuse(self, message: Message) -> None:
        from allranks.core.errors import StartError

        error = StartError(message["code"], message["what"], why=message["why"], fix=message["fix"])
        self._end = {"exit_code": 2, "text": str(error)}

    def _on_start(self, message: Message) -> None:
        if self.local is not None:
            self.local.close()
            self.local = None
        self._nodes, self._hub_rank = message["nodes"], message["hub"]
        self._reported_stop = False
        try:
            place = self._place(message)
            self.local = LocalRanks(place, self.options, self.env, self.num_cores, self.console, self.guard)
            self.local.start()
        except OSError as error:
            here, why = f"host {socket.gethostname()}", f"{type(error).__name__}: {error}"
            values = {
                "code": "AR046",
                "what": f"{here} cannot start its ranks",
                "why": why,
                "fix": "",
                "where": here,
            }
            self.link.send({"kind": "failed", **values})
            return
        self._port.begin(self.local, self._nodes, self._hub_rank)
        self.watching.start(self._port.job(self.options), self._port)

    def _place(self, message: Message) -> Place:
        several = len(self._nodes) > 1
        return Place(
            job_id=message["job_id"],
            restart=message["restart"],
            node_rank=message["node_rank"],
            num_nodes=len(self._nodes),
            first_rank=message["first_rank"],
            local_world_size=len(self._nodes[message["node_rank"]]["ranks"]),
            world_size=message["world_size"],
            master_addr=message["master_addr"],
            master_port=message["master_port"],
            run_dir=_run_dir(Path(message["run_dir"])),
            node_dir=self.node_dir,
            interface=network.interface_of(self.options.local_addr or message["address"]) if several else "",
        )

    def _on_signalled(self, message: Message) -> None:
        """Another node was told to stop; its ranks and ours are one job."""
        number, now = int(message["number"]), time.monotonic()
        if message.get("preempts"):
            preempt.ask_to_stop(self.node_dir, f"{signal.Signals(number).name} on host {message.get('host')}")
        if message.get("kills") and self.local is not None:
            self.local.kill()
        elif message.get("ends") and number not in self._requests.passed_on_at:
            self._forward(signal.SIGTERM if number == signal.SIGHUP else number, now)

    def _on_verdict(self, message: Message) -> None:
        self._print(message)
        if self.hub is None:
            self.watching.on_verdict(message["json"])

    def _on_story(self, message: Message) -> None:
        if self.local is not None:
            self.local.output.mute()
        self._print(message)
        if self.hub is None and message.get("is_verdict"):
            self.watching.on_verdict(message["json"])

    def _print(self, message: Message) -> None:
        if self.options.json:
            self.console.out.line(json.dumps(message["json"]))
        self.console.say(message["color_text"] if self.console.color else message["text"])

    def _on_stop(self, message: Message) -> None:
        if self.local is None:
            return
        default = self.options.grace_s == 2.0
        left = FAILURE_BUDGET_S - float(message.get("since", 0.0))
        self.local.stop(max(0.2, left) if default else self.options.grace_s)

    def _on_ask(self, message: Message) -> None:
        self._captures.append(self.watching.capture(message["request"]))

    def _on_end(self, message: Message) -> None:
        self._end = message
        if self.local is not None and not self.local.all_ended:
            self.local.stop(self.options.grace_s)

    def _look_at_hub(self, now: float) -> None:
        """A node that has lost the hub says what it sees, and ends its ranks."""
        if self.hub is not None or self._end is not None:
            return
        why = self.link.closed or silence(self.link, now, self.options.silence_s)
        self.watching.nodes = self._port.node_infos(self.watching.row, why, now - self.link.heard_at)
        if not why:
            return
        self._hub_lost_at = self._hub_lost_at or now
        if not self.watching.verdicts.empty():
            verdict = self.watching.verdicts.get()
            self._print(
                {"json": verdict.to_json(), "text": verdict.text(), "color_text": verdict.text(color=True)}
            )
        elif self.local is not None and self.watching.is_on and now - self._hub_lost_at < OWN_VIEW_S:
            return
        else:
            self.console.say(cut_off_text(self._nodes, self._hub_rank, self.options.host, why))
        self._end = {"exit_code": EXIT_MACHINE, "text": ""}
        if self.local is not None:
            self.local.output.mute()
            self.local.stop(self.options.grace_s)

    def _finish(self, end: Message) -> None:
        self._scheduled_stop.close()
        if self.local is not None:
            if self.local.stopping is None:
                self.local.stop(self.options.grace_s)
            if not self.local.stopping or not self.local.stopping.drive():
                return
            self._poll_ranks()
            self.local.close()
        if end.get("text"):
            self.console.say(end["text"] if end["text"].startswith("AR") else f"allranks: {end['text']}")
        self.preempted = bool(end.get("preempted"))
        self.exit_code = int(end["exit_code"])


def _run_dir(path: Path) -> Path:
    """The hub's run directory, or one of this node's own where the file systems differ."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError:
        path = Path("runs").absolute() / path.name
        path.mkdir(parents=True, exist_ok=True)
    return path
