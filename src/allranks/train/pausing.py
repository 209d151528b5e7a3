"""How do all ranks agree to do something after the same update, when only one of them was asked, without slowing the loop down?

A signal, a stop file or a timer reaches one rank. Its thread writes into the store that somebody asks; the threads of the other
ranks see it there. A rank that has seen it says so after its next update, and from then on looks into the store after every
update. Once all have said so, rank 0 writes "after the update that comes next", before it begins that update. No rank can finish
an update that rank 0 has not begun (they share its all-reduce), so every rank reads this in time. Until somebody asks, the loop pays
one comparison of two numbers per update.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allranks.core.errors import CommError

logger = logging.getLogger(__name__)

POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class Decision:
    """What all ranks do now, after the same update."""

    stop: str | None
    """Why to save and leave; None to go on."""
    save: bool


class Pause:
    """Requests to save or to stop, and the agreement about when.

    Args:
        store: Shared by the ranks; None for a world of one.
        synchronize: Waits for the device: an accelerator's queue may hold several updates that the host has passed.
        stop_file: The agent's: when it appears, the job is to save and leave.
        poll_s: How often to look at the file and into the store.
    """

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        store: Any = None,
        synchronize: Callable[[], None] = lambda: None,
        stop_file: Path | None = None,
        poll_s: float = POLL_S,
    ) -> None:
        self._rank, self._world_size = rank, world_size
        self._store: Any = store
        self._synchronize, self._stop_file, self._poll_s = synchronize, stop_file, poll_s
        self._stop: str | None = None
        self._save = False
        self._count = 0  # updates passed, the same on every rank
        self._round, self._asked_round = 0, -1
        self._told = self._acknowledged = self._decided = -1
        self._decision: dict[str, Any] | None = None
        self._every_s: float | None = None
        self._due_at = 0.0
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    # -- asking: from any thread, also from a signal handler (no locks here) ---------------------------------------------------

    @property
    def stop_reason(self) -> str | None:
        """Why this rank was asked to stop, if it was."""
        return self._stop

    def is_stop_asked(self) -> bool:
        """Whether any rank was asked to stop, as far as this one knows; costs a look into the store only if somebody asks."""
        if self._stop is not None or self._asked_round != self._round or self._store is None:
            return self._stop is not None
        return self._store.check([f"pause/{self._round}/stop"])

    def ask_to_stop(self, reason: str) -> None:
        """Save and leave after an update that all ranks agree on."""
        self._stop = self._stop or reason
        if self._world_size == 1:
            self._asked_round = self._round

    def ask_to_save(self) -> None:
        """Save after an update that all ranks agree on."""
        self._save = True
        if self._world_size == 1:
            self._asked_round = self._round

    def ask_to_save_every(self, seconds: float | None) -> None:
        """Ask to save each time `seconds` have passed since the last save."""
        self._every_s = seconds
        self.has_saved()

    def has_saved(self) -> None:
        """Begin to count the seconds anew."""
        self._due_at = time.monotonic() + (self._every_s or 0.0)

    # -- the loop --------------------------------------------------------------------------------------------------------------

    def after_update(self) -> Decision | None:
        """What to do now. Called by every rank after every update, after which no rank is ahead of rank 0."""
        self._count += 1
        if self._asked_round != self._round:
            return None
        if self._world_size == 1:
            return self._conclude({"stop": self._stop, "save": self._save})
        return self._agree()

    def _agree(self) -> Decision | None:
        self._synchronize()
        number, store = self._round, self._store
        if self._acknowledged != number:
            store.add(f"pause/{number}/seen", 1)
            self._acknowledged = number
        if self._rank == 0 and self._decided != number:
            self._decide(number)
        if self._decision is None and store.check([f"pause/{number}/go"]):
            self._decision = json.loads(store.get(f"pause/{number}/go"))
        if self._decision is None or self._count < self._decision["after"]:
            return None
        if self._count > self._decision["after"]:
            raise CommError(
                "AR622",
                f"rank {self._rank} has passed update {self._count}, and all ranks were to pause after {self._decision['after']}",
                why="the ranks do not do the same number of updates, or no update of theirs waits for the others",
                fix="the same number of run.step on every rank; run.step(None) where a rank has no loss",
            )
        return self._conclude(self._decision)

    def _decide(self, number: int) -> None:
        store = self._store
        if store.add(f"pause/{number}/seen", 0) < self._world_size:
            return
        stop = store.get(f"pause/{number}/stop").decode() if store.check([f"pause/{number}/stop"]) else None
        save = store.check([f"pause/{number}/save"])
        # This rank has not begun the next update, so no other can finish it before this is written.
        store.set(f"pause/{number}/go", json.dumps({"after": self._count + 1, "stop": stop, "save": save}))
        self._decided = number

    def _conclude(self, decision: dict[str, Any]) -> Decision:
        self._decision = None
        self._save = False
        if self._world_size == 1:
            self._stop = None
        self._round += 1
        return Decision(decision["stop"], decision["save"])

    # -- the thread ------------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to look for requests."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="allranks pause", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Look no longer."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._store = None  # rank 0's store, and its port, end with the run

    def _watch(self) -> None:
        while not self._closing.wait(self._poll_s):
            try:
                self._look()
            except Exception as error:  # noqa: BLE001 - a thread's edge: the store goes when another rank fails
                logger.debug("no longer looking for requests: %s", error)
                return

    def _look(self) -> None:
        if self._stop is None and self._stop_file is not None and self._stop_file.exists():
            self.ask_to_stop(_why(self._stop_file))
        if self._rank == 0 and self._every_s is not None and time.monotonic() >= self._due_at:
            self.has_saved()
            self.ask_to_save()
        if self._store is None:
            return
        number = self._round
        if self._told != number and (self._stop is not None or self._save):
            if self._save:
                self._store.set(f"pause/{number}/save", b"1")
            if self._stop is not None:
                self._store.set(f"pause/{number}/stop", self._stop.encode())
            self._store.set(f"pause/{number}/asked", b"1")
            self._told = number
        # The number, not a flag: if the loop has meanwhile ended this round, this says nothing about the next one.
        if self._asked_round != number and self._store.check([f"pause/{number}/asked"]):
            self._asked_round = number


def _why(stop_file: Path) -> str:
    text = ""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        text = str(json.loads(stop_file.read_text()).get("why", ""))
    return f"{text} at the launcher" if text else "the launcher asks to stop"
