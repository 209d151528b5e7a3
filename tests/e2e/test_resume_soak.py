"""Is a 2-rank job that is killed at random moments bit for bit the one that never was? Ranks one by one, all at once, the launcher.

ALLRANKS_SOAK_MOMENTS sets the number of kills (`make soak`: 200), ALLRANKS_SOAK_SEED repeats a run; the seed is in every failure.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from support.command import Command, StartCommand, command_path
from support.processes import variable_holders

MOMENTS = int(os.environ.get("ALLRANKS_SOAK_MOMENTS", "8"))
SEED = int(os.environ.get("ALLRANKS_SOAK_SEED", "0")) or random.SystemRandom().randrange(1, 2**32)
UPDATES_PER_MOMENT = 60
JOB = Path(__file__).with_name("resume_job.py")


class Soak:
    """One job under fire."""

    def __init__(
        self, start_command: StartCommand, folder: Path, rng: random.Random, num_updates: int
    ) -> None:
        self.start_command, self.folder, self.rng, self.num_updates = start_command, folder, rng, num_updates
        self.done: list[str] = []
        folder.mkdir()
        self.command = self.start()

    def start(self) -> Command:
        return self.start_command(
            command_path("allranks"), "run", "--nproc", "2", "--max-restarts", "100",
            "--run-dir", self.folder / "run", JOB, self.folder / "result", str(self.num_updates), "7",
            cwd=self.folder, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def progress(self) -> tuple[int, int]:
        try:
            attempt, updates = (self.folder / "result" / "progress").read_text().split()
        except (OSError, ValueError):
            return -1, -1
        return int(attempt), int(updates)

    def ranks(self) -> dict[int, int]:
        """Pids of the ranks by rank."""
        found: dict[int, int] = {}
        for pid in self.command.others():
            for rank in (0, 1):
                if pid in variable_holders("RANK", str(rank)):
                    found.setdefault(rank, pid)
        return found

    def wait_for_progress(self, before: tuple[int, int], timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and self.command.process.poll() is None:
            if self.progress() != before:
                return True
            time.sleep(0.02)
        return False

    def fire(self, kind: str) -> None:
        """Kill something, at a random moment of the start or of the training."""
        before = self.progress()
        if self.rng.random() < 0.8:
            self.wait_for_progress(before, 120)
        time.sleep(self.rng.uniform(0, 0.4))
        if self.command.process.poll() is not None:
            return
        if kind == "launcher":
            self.command.send(signal.SIGKILL)
            self.command.finish(20, orphans_s=10)
            self.done.append(f"launcher at {self.progress()}")
            self.command = self.start()
            return
        ranks = self.ranks()
        one = self.rng.randrange(2)
        chosen = [pid for rank, pid in ranks.items() if kind == "all ranks" or rank == one]
        for pid in chosen:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            self.done.append(f"{kind} at {self.progress()}")


def results(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / "result" / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.e2e
@pytest.mark.timeout(120 + 60 * MOMENTS)
def test_job_when_killed_at_random_moments_ends_bit_for_bit_the_same(
    start_command: StartCommand, tmp_path: Path
) -> None:
    rng = random.Random(SEED)
    num_updates = UPDATES_PER_MOMENT * MOMENTS
    whole = Soak(start_command, tmp_path / "whole", rng, num_updates)
    assert whole.command.finish(120 + 10 * MOMENTS).code == 0
    soak = Soak(start_command, tmp_path / "soak", rng, num_updates)
    # The launcher's pause before a restart doubles with each failure in a row: a new launcher after every second one.
    kinds = ["one rank", "all ranks", "launcher"]
    for number in range(MOMENTS):
        soak.fire(kinds[number % 3])
    done = soak.command.finish(120 + 10 * MOMENTS)
    story = f"seed {SEED}: {'; '.join(soak.done)}\n{done.story()}"
    print(story)
    assert done.code == 0, story
    assert len(soak.done) >= MOMENTS // 2, story
    assert results(tmp_path / "soak") == results(tmp_path / "whole"), story
