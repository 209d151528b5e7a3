"""Is a 2-rank job that is killed at random moments bit for bit the one that never was? Ranks one by one, all at once, the launcher.

After every moment all checkpoints that are there are compared with those of the job that was never stopped, by the checksums of their
files; each job runs to its end, which is compared too. Three in ten moments are under `allranks run --max-restarts`, the others on
ranks of a fork server, which start 20 times as fast. See support/soak.py for the variables.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import soak
from support.command import Command, StartCommand, command_path
from support.processes import variable_holders
from support.ranks import Outcome, run_outcomes, run_ranks
from support.resume_job import train
from support.soak import MOMENTS, NUM_RANKS, NUM_UPDATES, SAVE_STEPS, SEED, Reference

JOB = Path(__file__).parents[1] / "support" / "resume_job.py"
UNDER_THE_LAUNCHER = MOMENTS * 3 // 10
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180 + 60 * MOMENTS)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """The job that was never stopped."""
    folder = tmp_path_factory.mktemp("whole")
    run_ranks(NUM_RANKS, train, str(folder), NUM_UPDATES, SAVE_STEPS, None, init=False, timeout_s=120)
    return Reference(folder)


def folders(tmp_path: Path) -> Iterator[Path]:
    number = 0
    while True:
        number += 1
        (tmp_path / f"job{number}").mkdir()
        yield tmp_path / f"job{number}"


def kill_all(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


# -- ranks, started again by hand ------------------------------------------------------------------------------------------------


def start_and_kill(folder: Path, rng: random.Random, kind: str) -> list[Outcome]:
    """Start the ranks, kill one or all of them at a random moment; what became of them."""
    before, over = soak.pids(folder), threading.Event()
    one = rng.randrange(NUM_RANKS)

    def strike() -> None:
        soak.wait_for_moment(folder, rng, before, over.is_set, 0.3)
        wanted = range(NUM_RANKS) if kind == "all ranks" else [one]
        while not over.is_set() and any(soak.standing(folder, r)[0] in (0, *before) for r in wanted):
            time.sleep(0.002)  # it has not said its first word
        if not over.is_set():
            kill_all([soak.standing(folder, rank)[0] for rank in wanted])

    killer = threading.Thread(target=strike)
    killer.start()
    try:
        return run_outcomes(NUM_RANKS, train, str(folder), NUM_UPDATES, SAVE_STEPS, init=False)
    finally:
        over.set()
        killer.join()


def test_ranks_when_killed_at_random_moments_and_started_again_end_bit_for_bit_the_same(
    whole: Reference, tmp_path: Path
) -> None:
    rng, places = random.Random(SEED), folders(tmp_path)
    folder, counted = next(places), 0
    while counted < MOMENTS - UNDER_THE_LAUNCHER:
        kind = ("one rank", "all ranks")[counted % 2]
        begun = time.monotonic()
        outcomes = start_and_kill(folder, rng, kind)
        was_killed = any(o.exit_signal == signal.SIGKILL for o in outcomes)
        assert was_killed or all(o.is_good for o in outcomes), [o.story() for o in outcomes]
        differs = whole.differs(folder)
        if was_killed:
            counted += 1
            soak.log(kind, str(soak.standing(folder, 0)[1]), differs, time.monotonic() - begun)
        assert not differs, f"seed {SEED}, moment {counted}: {differs}"
        if not was_killed:
            folder = next(places)
    run_ranks(NUM_RANKS, train, str(folder), NUM_UPDATES, SAVE_STEPS, init=False)
    assert soak.is_complete(folder) and not whole.differs(folder), f"seed {SEED}"


# -- under the launcher, started again by it -------------------------------------------------------------------------------------

KINDS = ("one rank; the launcher starts again", "all ranks; the launcher starts again", "the launcher")


class Launched:
    """One job under `allranks run` after the other, and what is done to them."""

    def __init__(self, start_command: StartCommand, tmp_path: Path, rng: random.Random) -> None:
        self._start_command, self._rng, self._places = start_command, rng, folders(tmp_path)
        self.folder = next(self._places)
        self.before: tuple[int, ...] = ()
        self.command = self._start()

    def _start(self) -> Command:
        return self._start_command(
            command_path("allranks"), "run", "--nproc", str(NUM_RANKS), "--max-restarts", "1000",
            "--run-dir", self.folder / "run", JOB, self.folder, str(NUM_UPDATES), str(SAVE_STEPS),
            cwd=self.folder, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    @property
    def is_over(self) -> bool:
        return self.command.process.poll() is not None

    def next_job(self) -> None:
        self.folder, self.before = next(self._places), ()
        self.command = self._start()

    def ranks(self) -> list[int]:
        """Pids of the ranks, in order of rank."""
        ours = set(self.command.others())
        return [
            pid for rank in range(NUM_RANKS) for pid in variable_holders("RANK", str(rank)) if pid in ours
        ]

    def strike(self, kind: str) -> bool:
        """Kill at a random moment; False if the job was over before."""
        one = self._rng.randrange(NUM_RANKS)
        soak.wait_for_moment(self.folder, self._rng, self.before, lambda: self.is_over, 4.0)
        if kind == "the launcher":
            if self.is_over:
                return False
            self.before = soak.pids(self.folder)
            self.command.send(signal.SIGKILL)
            done = self.command.finish(20, orphans_s=20)
            assert not done.left_behind, done.story()
            self.command = self._start()
            return done.code == -signal.SIGKILL
        ranks = self.ranks()
        while not self.is_over and len(ranks) < NUM_RANKS:
            time.sleep(0.05)  # between two starts
            ranks = self.ranks()
        if self.is_over:
            return False
        self.before = soak.pids(self.folder)
        kill_all(ranks if kind == KINDS[1] else [ranks[one]])
        return True


def test_job_when_killed_under_the_launcher_at_random_moments_ends_bit_for_bit_the_same(
    start_command: StartCommand, whole: Reference, tmp_path: Path
) -> None:
    job, counted = Launched(start_command, tmp_path, random.Random(SEED + 1)), 0
    while counted < UNDER_THE_LAUNCHER:
        kind = KINDS[counted % len(KINDS)]
        begun, at = time.monotonic(), job.folder
        was_killed = job.strike(kind)
        differs = whole.differs(at)
        if was_killed:
            counted += 1
            soak.log(kind, str(soak.standing(at, 0)[1]), differs, time.monotonic() - begun)
        elif job.is_over:
            done = job.command.finish(20)
            assert done.code == 0 and soak.is_complete(at), f"seed {SEED}\n{done.story()}"
        assert not differs, f"seed {SEED}, moment {counted}: {differs}"
        if job.is_over and soak.is_complete(at):
            job.next_job()
    done = job.command.finish(120)
    assert done.code == 0 and soak.is_complete(job.folder), f"seed {SEED}\n{done.story()}"
    differs = whole.differs(job.folder)
    assert not differs, f"seed {SEED}: {differs}"
