"""The ranks of this node in one attempt: started together, read, polled, and ended together."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from allranks.core.job import RankExit, RankProcess
from allranks.run import processes
from allranks.run.environment import Place, command_of, of_rank
from allranks.run.options import Options
from allranks.run.output import Console, Output, close_ends
from allranks.run.processes import Guard, Rank, StopSequence
from allranks.run.signals import WARNINGS
from allranks.watch import proc


def shown_as(rank: int, local_rank: int, options: Options) -> str:
    """How a rank's output appears: "as-is", "prefixed", or "" for its log only."""
    hidden = _std(options.redirects, local_rank)
    teed = _std(options.tee, local_rank)
    if hidden and not teed:
        return ""
    if options.local_ranks_filter:
        return "prefixed" if local_rank in options.local_ranks_filter else ""
    if options.show == "all" or teed:
        return "prefixed"
    if options.show == "0":
        return "as-is" if rank == 0 else ""
    return "prefixed" if rank in options.show else ""


def _std(text: str, local_rank: int) -> bool:
    """Whether torchrun's -r/-t names this rank: "3" for all, or "0:1,1:2"."""
    if ":" not in text:
        return text not in ("", "0")
    return any(p.partition(":")[0] == str(local_rank) and p.partition(":")[2] != "0" for p in text.split(","))


class LocalRanks:
    """One attempt on this node.

    Args:
        place: Where the ranks stand in the job.
        options: As given.
        env: The agent's environment.
        num_cores: Cores this node may use.
        console: Where shown ranks appear.
        guard: Is told of every rank.
    """

    def __init__(
        self,
        place: Place,
        options: Options,
        env: Mapping[str, str],
        num_cores: int,
        console: Console,
        guard: Guard,
    ) -> None:
        self.place, self.options, self.guard = place, options, guard
        self.host = socket.gethostname()
        self.ranks: list[Rank] = []
        self.stopping: StopSequence | None = None
        self.started_at = time.monotonic()
        self._env, self._num_cores = env, num_cores
        self._waiting: list[tuple[Rank, int]] = []
        folder = Path(options.log_dir) / place.run_dir.name if options.log_dir else place.run_dir / "ranks"
        self.output = Output(console, folder)

    def start(self) -> None:
        """Start every rank.

        Raises:
            OSError: One could not be started; those that were are killed.
        """
        if self.place.node_dir is not None:
            self._make_record_dir(self.place.node_dir)
        command = command_of(self.options, self._env.get("PYTHON_EXEC") or sys.executable)
        for local_rank in range(self.place.local_world_size):
            self._start_one(local_rank, command)

    def processes(self) -> tuple[RankProcess, ...]:
        """For the watcher."""
        return tuple(
            RankProcess(r.rank, r.local_rank, r.pid, r.started_at, self.output.path(r.rank).absolute())
            for r in self.ranks
        )

    def poll(self) -> list[RankExit]:
        """The ranks that have ended since the last call. What a failed one left behind is killed."""
        ended: list[RankExit] = []
        for rank in self.ranks:
            if rank.poll():
                ended.append(self._exit_of(rank))
        return ended

    def forward(self, number: int) -> None:
        """Send a signal to the ranks themselves: their loader workers must not be killed before they can save.

        A warning waits until a rank can take it: one that is still starting would die of it.
        """
        for rank in self.ranks:
            if rank.code is None:
                self._waiting.append((rank, number))
        self.send_waiting()

    def send_waiting(self) -> None:
        """Send the signals for which ranks have a handler now."""
        waiting, self._waiting = self._waiting, []
        for rank, number in waiting:
            if rank.code is not None:
                continue
            if number in WARNINGS and not self.options.no_python and proc.catches(rank.pid, number) is False:
                self._waiting.append((rank, number))
            else:
                processes.send(rank.pid, number, group=self.options.no_python)

    def stop(self, grace_s: float) -> None:
        """Begin to end all ranks; `drive` goes on with it."""
        if self.stopping is None:
            self.stopping = StopSequence(self.place.job_id, grace_s, self.ranks)
            self.stopping.begin()
        elif grace_s <= 0:
            self.kill()

    def kill(self) -> None:
        """SIGKILL now."""
        if self.stopping is None:
            self.stopping = StopSequence(self.place.job_id, 0.0, self.ranks)
            self.stopping.begin(kill_at_once=True)
        else:
            self.stopping.kill()

    @property
    def all_ended(self) -> bool:
        return all(r.code is not None for r in self.ranks)

    def pause(self) -> None:
        """Ctrl-Z: stop the ranks too."""
        for rank in self.ranks:
            processes.send(rank.pid, signal.SIGSTOP, group=True)

    def go_on(self) -> None:
        for rank in self.ranks:
            processes.send(rank.pid, signal.SIGCONT, group=True)

    def close(self) -> None:
        """Everything has ended: close the logs, forget the groups."""
        self.output.close()
        for rank in self.ranks:
            self.guard.forget(rank.pid)

    def _make_record_dir(self, node_dir: Path) -> None:
        record = node_dir / "record"
        shutil.rmtree(record, ignore_errors=True)  # pages of the attempt before
        (node_dir / "stop").unlink(missing_ok=True)
        record.mkdir(parents=True, mode=0o700)

    def _start_one(self, local_rank: int, command: list[str]) -> None:
        rank = self.place.first_rank + local_rank
        env = of_rank(self.place, local_rank, self.options, self._env, self._num_cores)
        shown = shown_as(rank, local_rank, self.options)
        ends = self.output.open(rank, shown=shown, restart=self.place.restart, prefix=f"[rank {rank}] ")
        stdin = 0 if rank == 0 and _is_open(0) else os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        try:
            started = processes.start(
                rank, local_rank, command, env, stdin=stdin, stdout=ends[0], stderr=ends[1]
            )
        finally:
            close_ends(ends)
            if stdin:
                os.close(stdin)
        self.ranks.append(started)
        self.guard.add(started.pid)

    def _exit_of(self, rank: Rank) -> RankExit:
        assert rank.code is not None
        failed = rank.code != 0
        if not rank.has_group:
            self.guard.forget(rank.pid)
        lines = self.output.last_lines(rank.rank)
        self.output.release(rank.rank, drop_held=failed)
        return RankExit(
            rank=rank.rank,
            host=self.host,
            node_rank=self.place.node_rank,
            code=rank.code if rank.code >= 0 else -1,
            signal=-rank.code if rank.code < 0 else None,
            when=rank.ended_at - self.started_at,
            last_lines=lines[-400:],
            pid=rank.pid,
            by_us=rank.by_us,
        )


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True
