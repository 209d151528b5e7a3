"""What happens inside a rank of a test? (The process side of support.ranks; imported in the forked child.)"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import pickle
import signal
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

# Not one that training scripts, Slurm or allranks itself use.
STACK_SIGNAL = signal.SIGRTMAX - 1
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class RankSetup:
    """Everything a rank needs to know."""

    rank: int
    fn: bytes  # pickled (function, arguments): plain pickle, so tensors are copied, not shared
    env: dict[str, str]
    cwd: str
    log: str
    stack: str
    init: bool
    timeout_s: float


def rank_main(setup: RankSetup, pipe: Connection) -> None:
    """Run the function, report through the pipe, and wait for leave to go."""
    _settle(setup)
    stacks = open(setup.stack, "w")  # noqa: SIM115, PTH123 - open as long as the process lives
    faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=True)
    report: dict[str, Any] = {"result": None, "error": None, "traceback": "", "failed_at": float("inf")}
    try:
        fn, args = pickle.loads(setup.fn)
        if setup.init:
            _join(setup.timeout_s)
        report["result"] = pickle.dumps(fn(*args))
    except BaseException as error:  # noqa: BLE001 - the edge of the process: the test tells the story
        report["failed_at"] = time.monotonic()
        report["traceback"] = traceback.format_exc()
        report["error"] = _dumps_or_none(error)
    pipe.send_bytes(pickle.dumps(report))
    with contextlib.suppress(EOFError):
        pipe.recv_bytes()  # leaving early would close sockets that slower ranks still read
    if setup.init:
        _leave()


def _settle(setup: RankSetup) -> None:
    """A session, an environment, a folder and an output of its own."""
    os.setsid()
    if os.uname().sysname == "Linux":  # dies with the fork server, which dies with the test run
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ.clear()
    os.environ.update(setup.env)
    os.chdir(setup.cwd)
    log = os.open(setup.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    import torch

    # The server loaded torch before OMP_NUM_THREADS was set for this rank.
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


def _join(timeout_s: float) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=min(timeout_s, 30)))


def _leave() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def _dumps_or_none(error: BaseException) -> bytes | None:
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:  # noqa: BLE001 - errors of any library, with any constructor
        return None
    return data
