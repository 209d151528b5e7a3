"""How does one `allranks run` go, from the command line to its exit code?

parse -> preflight -> meet (be the hub, or go to it) -> agent -> exit code. Everything made on the way is unmade at the end.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from allranks.core.errors import StartError
from allranks.record import rundir
from allranks.run import devices, joining, network, node_dir, preflight, processes, wire
from allranks.run.agent import Agent
from allranks.run.endings import EXIT_MACHINE
from allranks.run.hub import Hub
from allranks.run.journal import Journal, now_text, versions
from allranks.run.options import Options, parse
from allranks.run.output import Console, flush_python_streams, open_closed_streams
from allranks.run.processes import Guard
from allranks.run.roster import Hello
from allranks.run.signals import ENDING, Signals
from allranks.run.watch_seam import NoWatch
from allranks.run.watching import Watching, make_watch, waker
from allranks.run.wire import Link, LocalLink, SocketLink
from allranks.watch import proc

EXIT_USAGE = 2


def launch(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """Run a job as the command line says; gives back the exit code of the launcher."""
    try:
        options = parse(argv, env)
    except StartError as error:
        print(error, file=sys.stderr)
        return EXIT_USAGE
    flush_python_streams()
    open_closed_streams()
    console = Console()
    try:
        return _Launch(options, env, console).run()
    except StartError as error:
        console.say(str(error))
        return EXIT_MACHINE if error.code in ("AR310", "AR316", "AR317") else EXIT_USAGE
    except InterruptedError as error:
        return 128 + int(error.args[0])
    finally:
        console.close()


@dataclass(slots=True)
class _Launch:
    options: Options
    env: Mapping[str, str]
    console: Console
    job_id: str = field(default_factory=lambda: secrets.token_hex(6))
    server: socket.socket | None = None
    hub: Hub | None = None
    journal: Journal | None = None

    def say(self, text: str) -> None:
        self.console.say(f"allranks: {text}")

    def run(self) -> int:
        for note in self.options.notes:
            self.say(note)
        preflight.check_script(self.options, self.env)
        found = devices.find(self.env)
        nproc = devices.num_ranks(self.options.nproc, found)
        role = self._role()
        if self.options.nproc == "1" and found.num_gpus > 1 and "PET_NPROC_PER_NODE" not in self.env:
            self.say(
                f"1 rank, as torchrun does without --nproc; this node has {found.num_gpus} GPUs (--nproc auto)"
            )
        hello = self._hello(nproc)
        if role == "member":
            return self._run_member(hello, found.num_cores)
        return self._run_hub(hello, found.num_cores)

    def _role(self) -> preflight.Role:
        role = preflight.role(self.options)
        if role == "alone":
            preflight.check_port(self.options)
        elif role == "hub":
            assert self.options.port is not None
            try:
                self.server = wire.listen(self.options.port)
            except OSError:
                if self.options.node_rank is None and self.options.backend == "c10d":
                    return "member"  # an agent of the same job on this host was here first
                raise preflight.port_taken(self.options.port) from None
        return role

    def _hello(self, nproc: int) -> Hello:
        options = self.options
        return Hello(
            host=socket.gethostname(),
            nproc=nproc,
            nproc_asked=options.nproc,
            node_rank=options.node_rank,
            job=options.job,
            min_nodes=options.min_nodes,
            max_nodes=options.max_nodes,
            free_port=network.free_port(),
            local_addr=options.local_addr,
            versions=versions(),
        )

    def _run_hub(self, hello: Hello, num_cores: int) -> int:
        options = self.options
        run = self._make_run_dir()
        self.journal = Journal(run, self.say)
        self.journal.describe(
            job=self.job_id,
            command=[options.script, *options.args],
            argv=sys.argv[1:],
            cwd=str(Path.cwd()),
            host=hello.host,
            launcher_pid=os.getpid(),
            launcher_started=proc.started(os.getpid()),
            versions=hello.versions,
            started_at=now_text(),
            launcher="allranks run",
        )
        nodes = f"{options.max_nodes} nodes of " if options.max_nodes > 1 else ""
        self.say(
            f"{nodes}{hello.nproc} rank{'s' * (hello.nproc > 1)} on {hello.host}, run directory {_short(run.path)}"
        )
        ours, hubs = LocalLink.pair()
        code = self._run_agent(ours, num_cores, hub_parts=(hubs, hello, run.path))
        if code == 0 and self.options.watch:
            self._say_where_time_went(run.path)
        self.journal.describe(ended_at=now_text())
        return code

    def _say_where_time_went(self, run_dir: Path) -> None:
        from allranks.perf.history import NoHistory, read_history
        from allranks.perf.summary import summary

        try:
            lines = summary(read_history(run_dir))
        except NoHistory:
            return
        except Exception as error:  # noqa: BLE001 - the job has ended well, whatever is wrong with its history
            assert self.journal is not None
            self.journal.event("no-summary", why=repr(error), traceback=traceback.format_exc())
            return
        if lines:
            self.say("\n          ".join([*lines, f"more: allranks report {_short(run_dir)}"]))

    def _run_member(self, hello: Hello, num_cores: int) -> int:
        with Signals() as signals:
            link = joining.join(
                self.options, hello, self.say, lambda: next((n for n in signals.take() if n in ENDING), 0)
            )
        greeting = link.receive()
        link.put_back(greeting)
        self.job_id = next((m["job_id"] for m in greeting if m["kind"] == "welcome"), self.job_id)
        return self._run_agent(link, num_cores, hub_parts=None)

    def _run_agent(self, link: Link, num_cores: int, hub_parts: tuple[Link, Hello, Path] | None) -> int:
        read, write = waker()
        watching = self._watching(write)
        folder = node_dir.choose(self.job_id, self.env)
        lock = node_dir.claim(folder)
        guard = Guard(self.job_id, (folder,))
        processes.become_subreaper()
        guard.start()
        if hub_parts is not None:
            self.hub = self._make_hub(hub_parts, watching)
        agent = Agent(
            self.options,
            self.env,
            num_cores=num_cores,
            console=self.console,
            link=link,
            hub=self.hub,
            server=self.server,
            watching=watching,
            wake_fd=read,
            node_dir=folder,
            guard=guard,
        )
        try:
            code = agent.run()
        finally:
            self._clean(guard, watching, folder, (read, write, lock), is_over=agent.exit_code is not None)
        if agent.preempted and self.options.requeue:
            self._requeue()
        return code

    def _watching(self, wake_fd: int) -> Watching:
        watch, why = make_watch() if self.options.watch else (NoWatch(), "")
        if why and self.journal is not None:
            self.journal.event("no-watch", why=why)

        def wake() -> None:
            with contextlib.suppress(OSError):
                os.write(wake_fd, b"w")

        def complain(text: str, trace: str) -> None:
            self.say(text)
            if self.journal is not None:
                self.journal.event("watcher-failed", text=text, traceback=trace)

        return Watching(watch, wake, complain)

    def _make_hub(self, parts: tuple[Link, Hello, Path], watching: Watching) -> Hub:
        assert self.journal is not None
        link, hello, run_dir = parts
        host = self.options.host
        return Hub(
            self.options,
            job_id=self.job_id,
            run_dir=run_dir,
            where=f"{host}:{self.options.port}" if self.options.max_nodes > 1 else hello.host,
            own=(link, hello),
            watching=watching,
            event=self.journal.event,
            describe=self.journal.describe,
        )

    def _make_run_dir(self) -> rundir.RunDir:
        try:
            if self.options.run_dir:
                return rundir.create(self.options.run_dir)
            return rundir.create_new(self.options.script, self.env.get("ALLRANKS_HOME", rundir.DEFAULT_HOME))
        except OSError as error:
            raise StartError(
                "AR042",
                f"the run directory cannot be made: {error.filename}",
                why=str(error.strerror),
                fix="--run-dir DIR, or ALLRANKS_HOME=DIR, where you may write",
            ) from error

    def _clean(
        self, guard: Guard, watching: Watching, folder: Path, fds: tuple[int, ...], *, is_over: bool
    ) -> None:
        watching.close()
        if not is_over:
            guard.abandon()  # a bug of ours: whatever runs is ended by the guard
        if self.hub is not None:
            _flush([n.link for n in self.hub.members.nodes])
        if self.server is not None:
            self.server.close()
        guard.done()
        shutil.rmtree(folder, ignore_errors=True)
        for fd in fds:
            if fd >= 0:
                os.close(fd)

    def _requeue(self) -> None:
        job = self.env.get("SLURM_JOB_ID", "")
        if not job:
            self.say("--requeue has no effect outside Slurm")
        elif self.hub is not None:
            # Said first: Slurm may end this job before scontrol has come back.
            self.say(f"Slurm is asked to queue job {job} again")
            asked = subprocess.run(
                ["scontrol", "requeue", job], capture_output=True, text=True, timeout=30, check=False
            )
            if asked.returncode != 0:
                self.say(f"scontrol: {asked.stderr.strip()}")


def _flush(links: Sequence[Link], limit_s: float = 1.0) -> None:
    """Give the last words time to leave, then close."""
    deadline = time.monotonic() + limit_s
    sockets = [link for link in links if isinstance(link, SocketLink)]
    while any(link.is_writing for link in sockets) and time.monotonic() < deadline:
        for link in sockets:
            link.receive()
        time.sleep(0.01)
    for link in sockets:
        link.close()


def _short(path: Path) -> str:
    """The path below the current folder, where it is there."""
    with contextlib.suppress(ValueError):
        return str(path.relative_to(Path.cwd()))
    return str(path)
