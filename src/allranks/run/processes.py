"""How are the ranks of this node started, seen, signalled and ended?

Each rank is a session of its own (its loader workers are in its process group), dies with the agent, and is marked with
ALLRANKS_JOB in its environment, so that everything that came from it can be found and ended.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from allranks.run import exec_rank, guard

PR_SET_CHILD_SUBREAPER = 36


def become_subreaper() -> None:
    """Orphans among the ranks' children become children of this process, where they can be seen and reaped."""
    if sys.platform != "linux":
        return
    import ctypes

    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


@dataclass(slots=True)
class Rank:
    """One started rank; `code` and `ended_at` are filled by `poll`."""

    rank: int
    local_rank: int
    process: subprocess.Popen[bytes]
    started_at: float
    code: int | None = None
    """As subprocess has it: negative for a signal."""
    ended_at: float = 0.0
    by_us: bool = False
    has_group: bool = True
    """Whether its process group may have members: the number of an empty group may be given to somebody else."""

    @property
    def pid(self) -> int:
        return self.process.pid

    def poll(self) -> bool:
        """Whether it has just ended; True once."""
        if self.code is not None:
            return False
        self.code = self.process.poll()
        self.ended_at = time.monotonic()
        if self.code is None:
            return False
        if self.code != 0:  # its loader workers have nobody to work for
            send(self.pid, signal.SIGKILL, group=True)
        self.has_group = send(self.pid, 0, group=True)
        return True

    def kill(self) -> None:
        """SIGKILL to it and its group."""
        if self.has_group:
            self.has_group = send(self.pid, signal.SIGKILL, group=True)


def start(
    rank: int,
    local_rank: int,
    command: Sequence[str],
    env: Mapping[str, str],
    *,
    stdin: int,
    stdout: int,
    stderr: int,
) -> Rank:
    """Start one rank in a session of its own; must be called from the main thread, whose death takes the rank along.

    The parent-death signal belongs to the thread that forks: a helper thread that ends would end the rank.
    """
    shim = [sys.executable, "-I", "-S", exec_rank.__file__, str(os.getpid()), *command]
    started_at = time.monotonic()
    process = subprocess.Popen(
        shim, env=dict(env), stdin=stdin, stdout=stdout, stderr=stderr, start_new_session=True, close_fds=True
    )
    return Rank(rank, local_rank, process, started_at)


def state_of(pid: int) -> str:
    """The kernel's letter for a process: R, S, D, T, t, Z ...; "" if it is gone or there is no /proc."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123 - read often, by the stop sequence and the watcher
            return file.read().rpartition(b")")[2].split()[0].decode()
    except (OSError, IndexError):
        return ""


def send(pid: int, number: int, *, group: bool = False) -> bool:
    """Send a signal; whether there was somebody to receive it."""
    try:
        (os.killpg if group else os.kill)(pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


@dataclass(slots=True)
class StopSequence:
    """SIGTERM, then `grace_s` later SIGKILL; SIGKILL at once for what is stopped (it would not see a SIGTERM).

    Drive it: `begin` once, then `drive` until it says True.
    """

    job_id: str
    grace_s: float
    ranks: list[Rank]
    begun_at: float = 0.0
    killed: bool = False
    _swept: int = 0

    def begin(self, *, kill_at_once: bool = False) -> None:
        """Ask all living ranks to end."""
        self.begun_at = time.monotonic()
        if kill_at_once or self.grace_s <= 0:
            self.kill()
            return
        for rank in self.ranks:
            if rank.code is None:
                rank.by_us = True
                if state_of(rank.pid) in ("T", "t"):
                    send(rank.pid, signal.SIGKILL, group=True)
                else:
                    send(rank.pid, signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL to every rank and its children."""
        self.killed = True
        for rank in self.ranks:
            if rank.code is None:
                rank.by_us = True
            rank.kill()

    def drive(self) -> bool:
        """Go on; True when no rank and nothing that came from them is left (or two seconds after SIGKILL)."""
        now = time.monotonic()
        alive = [r for r in self.ranks if r.code is None]
        if alive and not self.killed and now - self.begun_at >= self.grace_s:
            self.kill()
            self.begun_at = now
        if alive:
            return (
                self.killed and now - self.begun_at > 2.0
            )  # in uninterruptible sleep: the kernel ends it later
        return self._sweep(now)

    def _sweep(self, now: float) -> bool:
        """End what the ranks left behind: first their groups, then whatever carries the job."""
        for rank in self.ranks:
            rank.kill()
        left = [p for p in guard.carriers(self.job_id, os.getpid()) if state_of(p) not in ("Z", "X", "")]
        for pid in left:
            send(pid, signal.SIGKILL)
        return not left or now - self.begun_at > self.grace_s + 2.0


@dataclass(slots=True)
class Guard:
    """The agent's end of guard.py: it is told of every group, and started again should somebody kill it."""

    job_id: str
    paths: tuple[Path, ...]
    groups: set[int] = field(default_factory=set)
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the guard. It holds none of our streams: an ssh session must be able to end."""
        command = [
            sys.executable,
            "-I",
            "-S",
            guard.__file__,
            self.job_id,
            str(os.getpid()),
            *map(str, self.paths),
        ]
        env = {k: v for k, v in os.environ.items() if k != "ALLRANKS_JOB"}
        self.process = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )
        for group in self.groups:
            self._tell(f"+{group}")

    def add(self, group: int) -> None:
        self.groups.add(group)
        self._tell(f"+{group}")

    def forget(self, group: int) -> None:
        """The group is gone; its number may be given to somebody else."""
        self.groups.discard(group)
        self._tell(f"-{group}")

    def check(self) -> None:
        """Start it again if it has died."""
        if self.process is not None and self.process.poll() is not None:
            self.start()

    def abandon(self) -> None:
        """Have it kill everything, as if this process had died."""
        if self.process is not None and self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(3)
            self.process = None

    def done(self) -> None:
        """All is well: let it go without killing anything."""
        if self.process is None:
            return
        self._tell("done")
        with contextlib.suppress(OSError):
            if self.process.stdin is not None:
                self.process.stdin.close()
        try:
            self.process.wait(2)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process = None

    def _tell(self, line: str) -> None:
        if self.process is None or self.process.stdin is None:
            return
        with contextlib.suppress(OSError):  # it has died: check() starts another, which is told of all groups
            self.process.stdin.write(line.encode() + b"\n")
            self.process.stdin.flush()


def reap_adopted(known: set[int]) -> None:
    """Collect orphans that this process has adopted, without taking the exit status of a child in `known`."""
    while True:
        try:
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except (ChildProcessError, AttributeError, OSError):
            return
        if found is None or found.si_pid in known:
            return
        with contextlib.suppress(ChildProcessError):
            os.waitpid(found.si_pid, os.WNOHANG)
