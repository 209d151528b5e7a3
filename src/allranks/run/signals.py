"""What does the agent do about signals? It notes them; the loop forwards them to the ranks, and none ends the agent alone."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections import deque
from types import FrameType
from typing import Literal

FORWARDED = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
    if hasattr(signal, name)
)
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)
"""A user or a scheduler that sends one of these wants the job to end."""
PREEMPTING = (signal.SIGTERM, signal.SIGUSR1)
"""What schedulers send before the end of a job: ranks are asked to save and leave."""
WARNINGS = tuple(getattr(signal, name) for name in ("SIGUSR1", "SIGUSR2") if hasattr(signal, name))
"""Say something to a program that listens, and kill one that does not."""
SAME_REQUEST_S = 2.0
"""One of these that comes again within this time is the same request; later, it is a second one. As in the ranks (train/signals.py)."""


class Requests:
    """Which of the signals that come ask for something new? A scheduler signals a step and its batch script, and every node."""

    def __init__(self) -> None:
        self.passed_on_at: dict[int, float] = {}
        """When each signal was last passed on to the ranks here, also for another node."""
        self._ending = 0

    def judge(self, number: int, now: float) -> Literal["pass on", "kill", "ignore"]:
        """What a signal that has come to this node means: the second that asks for the end kills."""
        if number not in ENDING:
            return "pass on"
        passed_on_at = self.passed_on_at.get(number) if number in PREEMPTING else None
        if passed_on_at is not None and self._ending and now - passed_on_at < SAME_REQUEST_S:
            return "ignore"
        self._ending += 1
        if self._ending > 1:
            return "kill"
        return "pass on" if passed_on_at is None else "ignore"


class Signals:
    """Collects signals while it is entered; `fileno` becomes readable when one has come."""

    def __init__(self) -> None:
        self._came: deque[int] = deque()
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self._before: dict[int, object] = {}
        self._wakeup_before = -1

    def __enter__(self) -> Signals:
        self._wakeup_before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        for number in (*FORWARDED, signal.SIGCHLD, signal.SIGTSTP, signal.SIGCONT, signal.SIGWINCH):
            if signal.getsignal(number) == signal.SIG_IGN and number in (
                signal.SIGHUP,
                signal.SIGINT,
                signal.SIGQUIT,
                signal.SIGTSTP,
            ):
                continue  # nohup, or a shell's background job: the user wants it ignored
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, before in self._before.items():
            with contextlib.suppress(TypeError, ValueError):
                signal.signal(number, before)  # type: ignore[arg-type]  # as signal.signal gave it
        signal.set_wakeup_fd(self._wakeup_before)
        os.close(self._read)
        os.close(self._write)

    def fileno(self) -> int:
        return self._read

    def take(self) -> list[int]:
        """The signals that have come, in order."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._read, 4096)
        taken: list[int] = []
        while self._came:
            taken.append(self._came.popleft())
        return taken

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came.append(number)


def nobody_reads(fds: tuple[int, ...] = (1, 2)) -> bool:
    """Whether the terminal is closed or the reader of our output is gone (a dead ssh client, a closed pipe)."""
    poll = select.poll()
    for fd in fds:
        with contextlib.suppress(OSError, ValueError):
            os.fstat(fd)
            poll.register(fd, 0)
    try:
        return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
    except OSError:
        return False
