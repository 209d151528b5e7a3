"""How can several libraries be timed side by side without starting each of them again for every round?

All jobs are started and stay; one at a time is told to do a number of steps, while the others sleep in a read from a pipe. So a round of
all of them takes seconds, other work on the machine meets all alike, and each was warmed up as in a long training.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FIRST_STEP_WITHIN_S = 180.0
TURN_WITHIN_S = 180.0
GOES_WITHIN_S = 20.0


class Failed(RuntimeError):
    """A job ended, or did not answer."""


class Job:
    """One library's job on all its ranks, started and waiting for turns.

    Args:
        commands: One that starts all ranks, or one for each rank.
        ranks: Their number.
        environment: For all of them.
    """

    def __init__(
        self, name: str, commands: list[list[str]], ranks: int, environment: Mapping[str, str], cwd: Path
    ) -> None:
        self.name, self.ranks = name, ranks
        self._folder = tempfile.TemporaryDirectory(prefix="turns-")
        folder = Path(self._folder.name)
        self._go, self._said = [], []
        for rank in range(ranks):
            for kind, pipes in (("go", self._go), ("said", self._said)):
                os.mkfifo(folder / f"{kind}{rank}")
                pipes.append(os.open(folder / f"{kind}{rank}", os.O_RDWR))  # both ends: no open waits
        self._rest = [b""] * ranks
        self._log = (folder / "log").open("w+")
        shared = {**environment, "TURNS": str(folder), "STARTED": repr(time.time())}
        self._running = [
            subprocess.Popen(
                command,
                env={**shared, "RANK": str(rank)} if len(commands) > 1 else shared,
                cwd=cwd,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            for rank, command in enumerate(commands)
        ]

    def first_step(self) -> float:
        """Seconds from the start of the command to the end of the first step of the slowest rank."""
        return max(each["first_step_s"] for each in self._answers(FIRST_STEP_WITHIN_S))

    def turn(self, steps: int) -> tuple[float, float]:
        """Do so many steps: milliseconds per step, wall and processor, of the mean rank."""
        for pipe in self._go:
            os.write(pipe, f"{steps}\n".encode())
        answers = self._answers(TURN_WITHIN_S)
        return tuple(sum(a[k] for a in answers) / len(answers) for k in ("ms", "cpu_ms"))  # pyright: ignore[reportReturnType]

    def _answers(self, within_s: float) -> list[dict[str, Any]]:
        deadline = time.monotonic() + within_s
        return [json.loads(self._line(rank, deadline)) for rank in range(self.ranks)]

    def _line(self, rank: int, deadline: float) -> bytes:
        while b"\n" not in self._rest[rank]:
            if select.select([self._said[rank]], [], [], 0.2)[0]:
                self._rest[rank] += os.read(self._said[rank], 4096)
            elif any(p.poll() is not None for p in self._running) or time.monotonic() > deadline:
                raise Failed(f"{self.name} gave no answer:\n{self.output()[-1500:]}")
        line, _, self._rest[rank] = self._rest[rank].partition(b"\n")
        return line

    def output(self) -> str:
        """What it printed."""
        self._log.flush()
        return Path(self._log.name).read_text(errors="replace")

    def close(self) -> None:
        """Let it end by itself, or else end it."""
        for pipe in self._go:
            os.write(pipe, b"0\n")
        deadline = time.monotonic() + GOES_WITHIN_S
        for process in self._running:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 15)
                try:
                    process.wait(5)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, 9)
                    process.wait()
        for pipe in (*self._go, *self._said):
            os.close(pipe)
        self._log.close()
        self._folder.cleanup()
