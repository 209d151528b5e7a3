"""Who starts a DataLoader's workers, and makes sure that they end?"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import pickle
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from allranks.core.errors import UsageError
from allranks.data.torch_inside import shut_down


class WorkerPool:
    """The workers of one DataLoader."""

    def __init__(self, loader: DataLoader[Any], *, stay: bool) -> None:
        self._loader, self._stay = loader, stay
        self._source: Any = None
        self._processes: list[Any] = []

    @contextlib.contextmanager
    def epoch(self) -> Iterator[Iterator[Any]]:
        """The batches of one epoch; workers that do not stay for the next one end with it.

        Raises:
            UsageError: AR138 something cannot be sent to the workers.
        """
        if self._loader.num_workers == 0:
            yield iter(self._loader)
            return
        if not self._stay:
            self.stop()  # those of an epoch that was left and not yet collected
        self._start()
        try:
            yield self._source
        finally:
            if not self._stay:
                self.stop()

    def _start(self) -> None:
        _stop_all_at_exit(self)
        before = {process.pid for process in multiprocessing.active_children()}
        try:
            with warnings.catch_warnings():
                # torch says in a warning what the error below says.
                warnings.filterwarnings("ignore", message="Got pickle error")
                self._source = iter(self._loader)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            if "pickle" not in str(error):
                raise
            raise UsageError(
                "AR138",
                f"the loader workers cannot be started: {error}",
                why="the start method of the workers pickles the data set, collate_fn and worker_init_fn",
                fix="functions at the top level of a module instead of lambdas, or num_workers=0",
            ) from error
        self._processes += [p for p in multiprocessing.active_children() if p.pid not in before]

    def stop(self) -> None:
        """End the workers; one that torch could not end in its 5 s is killed, since it ignores SIGTERM."""
        source, self._source = self._source, None
        shut_down(self._loader, source)
        del source
        processes, self._processes = self._processes, []
        for process in processes:
            process.join(0.5)
            if process.is_alive():
                process.kill()
                process.join()


_pools: weakref.WeakSet[WorkerPool] = weakref.WeakSet()
_is_registered = False


def _stop_all_at_exit(pool: WorkerPool) -> None:
    # multiprocessing sends its children SIGTERM at exit and waits for them, for ever if they ignore it. Functions
    # registered later run earlier.
    global _is_registered
    _pools.add(pool)
    if not _is_registered:
        _is_registered = True
        atexit.register(_stop_all)


def _stop_all() -> None:
    for pool in list(_pools):
        pool.stop()
