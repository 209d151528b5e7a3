"""How does a save go on while training goes on, one at a time, without losing its errors?"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from allranks.core.errors import CheckpointError

_log = logging.getLogger(__name__)
_WORTH_A_WARNING_S = 0.5
_LOOK_AROUND_S = 0.5
Job = Callable[[threading.Event], Any]


class Background:
    """Runs one job at a time on a thread of its own.

    The thread is no daemon, so a script that ends does not cut a save short, and it stays from job to job: to start one waits
    until it runs, which on a busy machine takes longer than the copy of the state.
    """

    def __init__(self) -> None:
        self.give_up = threading.Event()
        self._thread: threading.Thread | None = None
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._done = threading.Event()
        self._done.set()
        self._name = ""
        self._error: BaseException | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a job is running."""
        return not self._done.is_set()

    def make_free(self, name: str) -> float:
        """Wait for the job before, and say so.

        Args:
            name: Who waits.

        Returns:
            Seconds waited.

        Raises:
            CheckpointError: AR608 the job before failed.
        """
        waited_s = 0.0
        if self.is_busy:
            begun = time.perf_counter()
            self.wait()
            waited_s = time.perf_counter() - begun
            _log.log(
                logging.WARNING if waited_s > _WORTH_A_WARNING_S else logging.INFO,
                "AR617 the save of %s waited %.1f s for %s to be written: saves come faster than the disk takes them; "
                "save less often, or to a faster disk",
                name,
                waited_s,
                self._name,
            )
        self.check()
        return waited_s

    def start(self, name: str, job: Job) -> None:
        """Start a job; there must be none."""
        assert not self.is_busy, "make_free() first"
        self._name = name
        self._done.clear()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="allranks checkpoints", daemon=False)
            self._thread.start()
        self._jobs.put(job)

    def run(self, name: str, job: Job) -> None:
        """Do a job on this thread; there must be none. Does not raise what it fails with: check() does."""
        assert not self.is_busy, "make_free() first"
        self._name = name
        self._try(job)

    def _work(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=_LOOK_AROUND_S)
            except queue.Empty:
                if not threading.main_thread().is_alive():
                    return
                continue
            if job is None:
                return
            self._try(job)
            self._done.set()

    def _try(self, job: Job) -> None:
        try:
            job(self.give_up)
        except BaseException as error:  # noqa: BLE001 - the edge of a thread: check() raises it in the training
            self._error = error

    def check(self) -> None:
        """Raise what a finished job failed with, once.

        Raises:
            CheckpointError: AR608, with the cause.
        """
        if self._error is None or self.is_busy:
            return
        error, self._error = self._error, None
        is_ours = isinstance(error, CheckpointError)
        text = f"{error.code} {error.what}" if is_ours else f"{type(error).__name__}: {error}"
        raise CheckpointError(
            "AR608",
            f"saving {self._name} in the background failed: {text}",
            why=getattr(error, "why", ""),
            fix=getattr(error, "fix", "")
            or "mend the cause, then start again with the same command: it resumes",
        ) from error

    def wait(self) -> None:
        """Wait for the running job; does not raise what it failed with."""
        self._done.wait()

    def close(self) -> None:
        """Wait for the running job, and end the thread; the next start() makes a new one."""
        self.wait()
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None
