"""How does the agent use a watcher without ever depending on it?

The watcher runs in a thread of its own. What it throws is said once and kept in RUN/events.jsonl; what it does not answer in time is done
without. See watch_seam.py for what is asked of it.
"""

from __future__ import annotations

import os
import queue
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from allranks.core.cores import stand_back
from allranks.core.job import Job, NodeInfo, RankExit
from allranks.run.watch_seam import NoWatch, Verdict, Watch

TICK_S = 0.1
MAX_CRASHES = 5
KEEP_ROW_S = 4.0
"""How long the last row of an attempt that is over goes along with the beats."""


class Answer:
    """What the watcher will say, or not."""

    def __init__(self) -> None:
        self.value: Any = None
        self.is_there = False


class Watching:
    """The thread in which a watcher lives.

    Args:
        watch: The watcher.
        wake: Called (from the thread) when there is something to collect.
        complain: Called (from the thread) with a text about a crash of the watcher, and its traceback.
    """

    def __init__(self, watch: Watch, wake: Callable[[], None], complain: Callable[[str, str], None]) -> None:
        self.row: dict[str, Any] = {}
        self.nodes: Mapping[int, NodeInfo] = {}
        self.verdicts: queue.SimpleQueue[Verdict] = queue.SimpleQueue()
        self._watch, self._wake, self._complain = watch, wake, complain
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._is_started = False
        self._drop_row_at = 0.0
        self._crashes = 0
        self._thread = threading.Thread(target=self._run, name="allranks-watch", daemon=True)
        if type(watch) is not NoWatch:
            self._thread.start()

    @property
    def is_on(self) -> bool:
        """Whether there is a watcher that answers."""
        return self._thread.is_alive() and self._crashes < MAX_CRASHES

    def start(self, job: Job, talk: Any) -> None:
        """An attempt begins."""

        def begin() -> None:
            self.row = {}
            self._watch.start(job, talk)
            self._is_started = True

        self._post(begin)

    def pause(self, *, keeps_row: bool = False) -> None:
        """The attempt is over: no more ticks until the next start, and nothing of this one is left for it.

        Args:
            keeps_row: The row is made once more and goes along with the beats: what failed ranks left behind is in it.
        """
        self.nodes = {}

        def rest() -> None:
            self._is_started, self.row = False, self._watch.row() if keeps_row else {}
            self._drop_row_at = time.monotonic() + KEEP_ROW_S

        self._post(rest)

    def ended(self, exit: RankExit) -> None:
        self._post(lambda: self._watch.ended(exit))

    def on_exit(self, exits: Sequence[RankExit]) -> Answer:
        """Ask for the verdict of an attempt that ended badly; the row is made once more before, and tells where the training stood."""

        def judge() -> Any:
            self._guarded(self._make_row)  # that of before may be half a second old
            return self._watch.on_exit(exits, self.nodes)

        return self._ask(judge)

    def last_look(self) -> Answer:
        """Ask what is left to say of an attempt that ended well; verdicts are put where those of ticks are."""

        def look() -> bool:
            found = self._watch.last_look()
            for verdict in found or ():
                self.verdicts.put(verdict)
            return found is not None

        return self._ask(look)

    def capture(self, request: dict[str, Any]) -> Answer:
        return self._ask(lambda: self._watch.capture(request))

    def on_bundle(self, node_rank: int, bundle: dict[str, Any]) -> None:
        self._post(lambda: self._watch.on_bundle(node_rank, bundle))

    def on_verdict(self, verdict: dict[str, Any]) -> None:
        self._post(lambda: self._watch.on_verdict(verdict))

    def close(self, timeout_s: float = 0.5) -> None:
        """Let the watcher clean up, for at most so long."""
        if self._thread.is_alive():
            self._post(self._watch.close)
            self._calls.put(None)
            self._thread.join(timeout_s)

    def _post(self, call: Callable[[], None]) -> None:
        if self._thread.is_alive():
            self._calls.put(call)

    def _ask(self, call: Callable[[], Any]) -> Answer:
        answer = Answer()
        if not self.is_on:
            answer.is_there = True
            return answer

        def reply() -> None:
            try:
                answer.value = call()
            finally:
                answer.is_there = True
                self._wake()

        self._calls.put(reply)
        return answer

    def _run(self) -> None:
        stand_back()
        next_tick = time.monotonic()
        while True:
            try:
                call = self._calls.get(timeout=max(0.0, next_tick - time.monotonic()))
            except queue.Empty:
                next_tick = time.monotonic() + TICK_S
                if self._is_started and self._crashes < MAX_CRASHES:
                    self._guarded(self._tick)
                elif not self._is_started and next_tick > self._drop_row_at:
                    self.row = {}
                continue
            if call is None:
                return
            self._guarded(call)

    def _tick(self) -> None:
        if self._watch.is_quiet(self.nodes):
            return
        self._make_row()
        verdicts = self._watch.tick(self.nodes)
        for verdict in verdicts:
            self.verdicts.put(verdict)
        if verdicts:
            self._wake()

    def _make_row(self) -> None:
        self.row = self._watch.row()

    def _guarded(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - whatever the watcher does, the job goes on
            self._crashes += 1
            if self._crashes == 1:
                self._complain(
                    f"the watcher failed ({type(error).__name__}: {error}); the job goes on",
                    traceback.format_exc(),
                )


def make_watch() -> tuple[Watch, str]:
    """The watcher of this installation, or one that does nothing and why."""
    try:
        from allranks import watch

        return watch.make_watch(), ""  # type: ignore[attr-defined]  # the other side of the seam
    except Exception as error:  # noqa: BLE001 - a broken watcher must not keep a job from starting
        return NoWatch(), f"no watcher: {type(error).__name__}: {error}"


def waker() -> tuple[int, int]:
    """A pipe by which a thread wakes the agent's loop."""
    read, write = os.pipe()
    os.set_blocking(read, False)
    os.set_blocking(write, False)
    return read, write
