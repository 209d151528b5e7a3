"""How does a test run a function on real ranks?

    results = run_ranks(3, average_of_uneven_parts, [1, 2, 3])    # one result per rank, in order of rank
    outcomes = run_outcomes(2, hang_on_rank_1, timeout_s=5)       # for tests of failures: what became of each

Every rank is a process of its own, forked from a server that has torch loaded (two ranks need about 0.1 s),
in an environment as torchrun would have made it, so `allranks.start()` and `init_process_group("gloo")` work
inside. The function must be importable (top level of a test module) and its arguments must survive pickle.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from support.processes import kill_session, session_members, state_of
from support.rank_process import STACK_SIGNAL, RankSetup, rank_main

# torch._dynamo is what the first optimizer of a process imports: 2.5 s of processor time in every rank otherwise.
PRELOAD = [
    "torch",
    "torch._dynamo",
    "torch.distributed",
    "torch.nn.parallel",
    "torch.utils.data",
    "torch.profiler",
    "safetensors.torch",
    "pytest",
    "allranks.train.start",
]
# Ranks that lose a peer raise at once; who has not ended this long after the first failure waits for good.
GRACE_AFTER_FAILURE_S = 3.0


@dataclass
class Outcome:
    """What became of one rank."""

    rank: int
    result: Any = None
    error: BaseException | None = None
    traceback: str = ""
    failed_at: float = float("inf")  # time.monotonic() of the failure: the order of events on this machine
    exit_signal: int | None = None  # it was killed, by itself or by another, not by the harness
    exit_code: int | None = None  # it ended without a report: os._exit()
    has_ended: bool = True  # False: the harness had to end it
    stack: str = ""  # where it was, if it had not ended
    output: str = ""  # its stdout and stderr
    left_behind: list[str] = field(default_factory=list)  # processes of its session that outlived it

    @property
    def has_died(self) -> bool:
        """It ended without a report: by a signal, or by os._exit()."""
        return self.exit_signal is not None or self.exit_code is not None

    @property
    def is_good(self) -> bool:
        """It returned, and left nothing behind."""
        return self.has_ended and not (self.has_died or self.traceback or self.left_behind)

    @property
    def is_victim(self) -> bool:
        """It reports that another did not come or went away."""
        last = self.traceback.strip().rsplit("\n", 1)[-1]
        signs = ("closed by peer", "Timed out waiting", "DistNetworkError", "Broken pipe")
        return any(sign in last for sign in signs)

    def story(self) -> str:
        """What to tell about this rank when a test fails."""
        if not self.has_ended:
            head, body = "had not ended; its stack:", self.stack or "(none: the process did not answer)"
        elif self.exit_signal is not None:
            head, body = f"was ended by {signal.Signals(self.exit_signal).name}", ""
        elif self.exit_code is not None:
            head, body = f"exited with code {self.exit_code} before it returned", ""
        elif self.traceback:
            head, body = "raised:", self.traceback
        elif self.left_behind:
            head, body = "left processes behind:", "\n".join(self.left_behind)
        else:
            head, body = "returned", ""
        printed = f"\n--- it printed:\n{self.output[-4000:]}" if self.output and not self.is_good else ""
        return f"rank {self.rank} {head}\n{body}{printed}".rstrip()


def run_ranks(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout_s: float = 60,
    init: bool = True,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    may_die: Sequence[int] = (),
) -> list[Any]:
    """The results of `fn(*args)` in order of rank; AssertionError with every rank's story if one is bad.

    Args:
        timeout_s: Everything must have ended by then.
        init: Join a gloo process group before `fn`, leave it after. False if `fn` does so itself.
        env: More variables for the ranks.
        cwd: Where the ranks run; a folder that is deleted afterwards if not given.
        may_die: Ranks whose death by a signal or os._exit is part of the test; their result is None.
    """
    outcomes = run_outcomes(world_size, fn, *args, timeout_s=timeout_s, init=init, env=env, cwd=cwd)
    if any(not (o.is_good or (o.has_died and o.rank in may_die)) for o in outcomes):
        raise AssertionError(tell(outcomes))
    return [o.result for o in outcomes]


def tell(outcomes: Sequence[Outcome]) -> str:
    """Every rank's story, the root cause first: who failed first, victims of a lost peer after the others."""

    def order(o: Outcome) -> tuple[int, float]:
        if o.is_good:
            return 3, 0.0
        if o.is_victim:
            return 2, o.failed_at
        return (0 if o.has_ended else 1), o.failed_at

    head = f"{sum(not o.is_good for o in outcomes)} of {len(outcomes)} ranks failed, the first cause first"
    return "\n\n".join([head, *(o.story() for o in sorted(outcomes, key=order))])


def run_outcomes(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout_s: float = 60,
    init: bool = True,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> list[Outcome]:
    """What became of `fn(*args)` on every rank; never raises for what a rank did. Arguments as run_ranks."""
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    # Port 0 and a server in this process: no port can be taken by another test run.
    store_timeout = timedelta(seconds=timeout_s)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=store_timeout)
    with tempfile.TemporaryDirectory(prefix="allranks-ranks-") as folder:
        work = Path(folder, "cwd")
        work.mkdir()
        setups = [
            RankSetup(
                rank=rank,
                fn=pickle.dumps((fn, args)),
                env={**os.environ, **torchrun_env(rank, world_size, store.port), **(env or {})},
                cwd=str(cwd or work),
                log=str(Path(folder, f"rank{rank}.log")),
                stack=str(Path(folder, f"rank{rank}.stack")),
                init=init,
                timeout_s=timeout_s,
            )
            for rank in range(world_size)
        ]
        ranks = [_Rank(setup) for setup in setups]
        try:
            _gather(ranks, time.monotonic() + timeout_s)
        finally:
            for rank in ranks:
                rank.end()
        return [rank.outcome for rank in ranks]


def torchrun_env(rank: int, world_size: int, port: int) -> dict[str, str]:
    """The variables torchrun gives to a rank of one node, with the store served by the launcher."""
    places = {"RANK": rank, "LOCAL_RANK": rank, "ROLE_RANK": rank, "GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1}
    sizes = {"WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size, "ROLE_WORLD_SIZE": world_size}
    restarts = {"TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_MAX_RESTARTS": 0}
    numbers = {**places, **sizes, **restarts, "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
    words = {
        "MASTER_ADDR": "127.0.0.1",
        "ROLE_NAME": "default",
        "TORCHELASTIC_RUN_ID": "test",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    return {**words, **{name: str(value) for name, value in numbers.items()}}


class _Rank:
    """The harness's end of one rank."""

    def __init__(self, setup: RankSetup) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self.setup = setup
        self.outcome = Outcome(setup.rank)
        self.has_reported = False
        self.pipe: Connection
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=rank_main, args=(setup, theirs))
        self.process.start()
        theirs.close()

    def receive(self) -> None:
        """Take its report, or note that it died without one."""
        outcome = self.outcome
        try:
            report = pickle.loads(self.pipe.recv_bytes())
        except (EOFError, OSError):
            self.process.join(5)
            code = self.process.exitcode or 0
            outcome.exit_signal, outcome.exit_code = (-code, None) if code < 0 else (None, code)
            outcome.failed_at = time.monotonic()
        else:
            outcome.traceback, outcome.failed_at = report["traceback"], report["failed_at"]
            outcome.error = _load(report["error"])
            outcome.result = _load(report["result"])
        self.has_reported = True

    def release(self) -> None:
        """Let it leave its process group: nobody needs it any more."""
        with contextlib.suppress(OSError):
            self.pipe.send_bytes(b"go")

    def end(self) -> None:
        """End the process if it lives, and everything it started; keep what it can still tell."""
        outcome, pid = self.outcome, self.process.pid
        assert pid is not None
        self.process.join(5 if self.has_reported else 0)
        if self.process.is_alive():
            outcome.has_ended = False
            outcome.stack = self._take_stack(pid)
        else:
            outcome.left_behind = session_members(pid)
        kill_session(pid)
        self.process.join(5)
        self.process.close()
        self.pipe.close()
        log = Path(self.setup.log)
        outcome.output = log.read_text(errors="replace") if log.exists() else ""

    def _take_stack(self, pid: int) -> str:
        if state_of(pid) in ("T", "t"):
            return "(stopped by a signal: it cannot tell)"
        os.kill(pid, STACK_SIGNAL)
        stack, deadline = Path(self.setup.stack), time.monotonic() + 1
        text = ""
        while time.monotonic() < deadline and not text.endswith("\n"):
            time.sleep(0.02)  # faulthandler writes from the signal handler; there is nothing to wait on
            text = stack.read_text() if stack.exists() else ""
        return text


def _load(data: bytes | None) -> Any:
    return None if data is None else pickle.loads(data)


def _gather(ranks: Sequence[_Rank], deadline: float) -> None:
    """Collect reports until all have come, or too late, or too long after the first failure."""
    pending = {rank.pipe: rank for rank in ranks}
    while pending:
        ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = pending.pop(pipe)
            rank.receive()
            if not rank.outcome.is_good:
                deadline = min(deadline, time.monotonic() + GRACE_AFTER_FAILURE_S)
                rank.release()  # its closed sockets tell the others
    for rank in ranks:
        rank.release()
