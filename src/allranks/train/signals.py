"""What does a rank do when it is told to go? It saves after an update that all ranks agree on, and ends with code 0.

Schedulers send SIGTERM or SIGUSR1 some time before they kill. A second one of the same kind ends the process at once.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

PREEMPTING = (signal.SIGTERM, signal.SIGUSR1)
# A scheduler signals the whole process group, and the launcher in it passes the signal on: one request arrives twice.
_SAME_REQUEST_S = 2.0


class StopSignals:
    """Turns the first signal into a request; restores what was there before on close()."""

    def __init__(self, ask_to_stop: Callable[[str], None], where: str) -> None:
        self._ask, self._where = ask_to_stop, where
        self._before: dict[int, Any] = {}
        self._first_at: dict[int, float] = {}

    def install(self) -> None:
        """Take the signals that nobody in this process handles yet. Only from the main thread; elsewhere nothing happens."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in PREEMPTING:
            # Somebody's own handler, a C handler (None: faulthandler) and an ignored signal stay as they are.
            if signal.getsignal(number) is signal.SIG_DFL:
                self._before[number] = signal.signal(number, self._handle)

    def close(self) -> None:
        """Give the signals back."""
        for number, before in self._before.items():
            signal.signal(number, before)
        self._before.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        first = self._first_at.setdefault(number, now)
        if now - first > _SAME_REQUEST_S:
            os._exit(128 + number)
        self._ask(f"{signal.Signals(number).name} at {self._where}")
