"""What does a loader worker do when it starts?

A worker is seeded (torch, random, numpy), shows the user's data set in get_worker_info(), dies with its rank, and leaves
signals that are meant for the rank to the rank: a SIGTERM to the whole process group must not end the workers before
the rank has saved its checkpoint.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.utils.data import get_worker_info

from allranks.data.randomness import mix, seed_all
from allranks.data.torch_inside import change_worker_info

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_WORKER = 0x776F726B


class WorkerStart:
    """The worker_init_fn the DataLoader sees; calls the user's own at the end.

    Args:
        as_one_of: For a data set that divides itself over workers: this rank's workers are shown to it as some of the
            workers of all ranks.
    """

    def __init__(
        self,
        dataset: Any,
        user_function: Callable[[int], Any] | None,
        *,
        as_one_of: tuple[int, int] | None = None,  # (rank, world_size)
    ) -> None:
        self.dataset, self.user_function, self.as_one_of = dataset, user_function, as_one_of
        self.parent = os.getpid()
        # The kernel's signal comes when the *thread* that forked ends, so only the main thread may ask for it.
        self.dies_with_parent = (
            sys.platform == "linux" and threading.current_thread() is threading.main_thread()
        )

    def __call__(self, worker_id: int) -> None:
        # With the forkserver the worker is that server's child, and notices by itself that the rank is gone.
        if self.dies_with_parent and os.getppid() == self.parent:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        # It may have died before the signal was asked for: its first batch can be there before its other workers begin.
        if _is_gone(self.parent):
            os._exit(1)
        leave_signals_to_the_rank()
        info = get_worker_info()
        if info is not None:
            seed_all(mix(info.seed, _WORKER))
            change_worker_info(info, dataset=self.dataset)  # it says our reader
            if self.as_one_of is not None:
                rank, world_size = self.as_one_of
                first = rank * info.num_workers
                change_worker_info(info, id=first + info.id, num_workers=world_size * info.num_workers)
        if self.user_function is not None:
            self.user_function(worker_id)


def _is_gone(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False


def leave_signals_to_the_rank() -> None:
    """Ignore SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 in this worker, except where C code (faulthandler) waits for one.

    torch's own handler of SIGTERM ends the worker at once, whoever sent it; WorkerPool does not rely on it.
    """
    caught = _caught_in_c()
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        in_c = caught & (1 << (number - 1)) and not callable(signal.getsignal(number))
        if number == signal.SIGTERM or not in_c:
            signal.signal(number, signal.SIG_IGN)


def _caught_in_c() -> int:
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return int(line.split()[1], 16)
    return 0
