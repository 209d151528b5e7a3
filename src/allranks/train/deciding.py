"""How do ranks decide together, log, print, and wait for work that only one of them does?"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from typing import Any

from allranks.comm import values
from allranks.comm.membership import wait_for_key
from allranks.core.errors import CommError
from allranks.metrics.sinks import plain_value
from allranks.record.values import Phase
from allranks.train.state import RunState

logger = logging.getLogger(__name__)


class Deciding(RunState):
    """The part of a run in which all ranks come to one answer."""

    def any(self, flag: object) -> bool:
        """Whether the flag is true on at least one rank. Collective."""
        self._require_open("any")
        return values.any_rank(flag)

    def all(self, flag: object) -> bool:
        """Whether the flag is true on all ranks. Collective."""
        self._require_open("all")
        return values.every_rank(flag)

    def agree(self, value: Any) -> Any:
        """Rank 0's value on every rank, for decisions such as a name, a threshold or a best score. Collective."""
        self._require_open("agree")
        return values.from_rank_zero(value)

    def stop(self, reason: str) -> None:
        """Ask all ranks to end after this epoch; one rank is enough. Not collective: run.epochs agrees on it."""
        self._stop_reason = self._stop_reason or reason

    def agreed_stop(self) -> str | None:
        """The reason of the lowest rank that asked to stop, the same on every rank; None if none did. Collective."""
        if not values.any_rank(self._stop_reason is not None):
            return None
        reasons = values.gather_objects(self._stop_reason)
        rank, reason = next((r, s) for r, s in enumerate(reasons) if s is not None)
        self._stop_reason = reason
        if self.is_rank_zero:
            logger.info("stopped before epoch %d: %s (rank %d)", self.epoch, reason, rank)
        return reason

    def barrier(self, name: str = "barrier", timeout_s: float | None = None) -> None:
        """Wait for all ranks. Collective.

        Raises:
            CommError: AR021 with the ranks that have not come, after `timeout_s` (the run's timeout for steps if not given); AR020
                another rank failed.
        """
        self._require_open("barrier")
        store: Any = self._membership.store
        if store is None:
            return
        self._barriers[name] = number = self._barriers.get(name, 0) + 1
        key = f"barrier/{name}/{number}"
        store.set(f"{key}/{self.rank}", b"1")
        limit, begun = self._membership.timeout_s if timeout_s is None else timeout_s, time.monotonic()
        for rank in range(self.world_size):
            wait_for_key(
                self._membership,
                f"{key}/{rank}",
                limit,
                lambda: f"{name}: {self._missing(key)} did not come",
                begun=begun,
            )

    def _missing(self, key: str) -> str:
        store: Any = self._membership.store
        ranks = [str(r) for r in range(self.world_size) if not store.check([f"{key}/{r}"])]
        return f"rank{'s' * (len(ranks) != 1)} {', '.join(ranks)}"

    @contextlib.contextmanager
    def rank_zero_first(self, what: str = "rank 0's work", timeout_s: float | None = None) -> Iterator[bool]:
        """Rank 0 runs the block first (True); the others run it when rank 0 is through (False). Collective.

        For downloads, tokenizing, building caches: the others wait on a key and not in a collective, so the work may outlast the
        timeout for steps by saying how long it may take. A failure of rank 0 is raised on all.

        Args:
            what: For messages: "the download".
            timeout_s: How long the others wait; the run's timeout for steps if not given.

        Raises:
            CommError: AR020 rank 0 failed, AR021 rank 0 has not finished in time.
        """
        self._require_open("rank_zero_first")
        store: Any = self._membership.store
        if store is None:
            yield True
            return
        self._barriers[what] = number = self._barriers.get(what, 0) + 1
        key = f"first/{what}/{number}"
        if self.is_rank_zero:
            try:
                yield True
            except BaseException as error:
                store.set(key, (f"{type(error).__name__}: {error}".splitlines() or [""])[0].encode())
                raise
            store.set(key, b"")
            return
        limit = self._membership.timeout_s if timeout_s is None else timeout_s
        missing = f"rank 0 has not finished {what}"
        failure = wait_for_key(self._membership, key, limit, lambda: missing).decode()
        if failure:
            raise CommError(
                "AR020",
                f"rank 0 failed in {what}: {failure}",
                fix="read the traceback of rank 0: the cause is there",
            )
        yield False

    def log(self, values_: dict[str, Any] | None = None, /, *, step: int | None = None, **more: Any) -> None:
        """Write values down: rank 0 appends to RUN/metrics.jsonl and the other trackers; other ranks do nothing. Not collective.

        Tensors are read here (which waits for the device), on rank 0 only: bring values together with run.mean or run.sum first.

        Args:
            values_: Names that are no Python identifiers, e.g. {"loss/train": 0.1}.
            step: The update they belong to; run.updates if not given.
        """
        if not self._is_open:
            self._require_open("log")
        if not self.is_rank_zero:
            return
        self._record.phase(Phase.LOG)
        try:
            self._write_down(values_, more, step)
        finally:
            self._record.leave()

    def _write_down(self, values_: dict[str, Any] | None, more: dict[str, Any], step: int | None) -> None:
        plain_values = {k: plain_value(k, v) for k, v in {**(values_ or {}), **more}.items()}
        self._logged.update(plain_values)
        if self._sinks is None:
            self._sinks = self._make_sinks(self._resumed_at)
        for sink in self._sinks:
            sink.log(plain_values, self.updates if step is None else step)

    def print(self, *what: Any, **how: Any) -> None:
        """print, on rank 0 only. Not collective."""
        if self.is_rank_zero:
            print(*what, **how)
