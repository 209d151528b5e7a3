"""How quick is a script with these settings? One trial: a launch of its own, looked at from outside, ended when enough is seen.

The steps are counted in the ranks' records, so a trial needs nothing of the script; it is stopped by its launcher (run/trial.py), which
leaves no process.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from allranks.core.overrides import VARIABLE
from allranks.record.page import Record, Role, read_pages
from allranks.run import trial
from allranks.tune.search import Measured

WARM_UP_UPDATES = 5
"""Not counted: workers start, kernels are chosen, caches fill."""
POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Script:
    """What is tried."""

    path: str
    args: tuple[str, ...] = ()
    nproc: int = 1
    launch: tuple[str, ...] = ()
    """More options of `allranks run`, such as -m."""


@dataclass(slots=True)
class Trials:
    """Makes trials of one script.

    Args:
        script: What to run.
        measure_s: Seconds that a trial is looked at, after its warm-up; less where the figure is steady sooner.
        start_s: Seconds until its first updates must have been seen.
    """

    script: Script
    measure_s: float = 4.0
    start_s: float = 120.0
    in_effect: dict[str, Any] = field(default_factory=dict)
    """What the script had in the last trial without settings."""

    def __call__(self, settings: dict[str, Any], give_up_below: float) -> Measured:
        """One trial; see search.Measure."""
        with tempfile.TemporaryDirectory(prefix="allranks-tune-") as name:
            folder = Path(name)
            output = folder / "output.txt"
            with trial.launched(self._command(folder, settings), _environment(folder), output) as process:
                counted = self._watch(process, give_up_below)
            if not settings:
                self.in_effect = _in_effect(folder)
            return self._measured(settings, counted, process, output)

    def _command(self, folder: Path, settings: dict[str, Any]) -> list[str]:
        given = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
        return trial.command(
            self.script.nproc, folder, [*given, *self.script.launch], [self.script.path, *self.script.args]
        )

    def _watch(self, process: subprocess.Popen[bytes], give_up_below: float) -> Counted:
        counted = Counted()
        deadline = time.monotonic() + self.start_s
        while process.poll() is None:
            time.sleep(POLL_S)
            counted.add(_ranks(process.pid), time.monotonic())
            if counted.begun_at is None:
                if time.monotonic() > deadline:
                    counted.failure = f"no {WARM_UP_UPDATES} updates within {self.start_s:.0f} s"
                    break
            elif counted.is_enough(self.measure_s, give_up_below):
                break
        return counted

    def _measured(
        self, settings: dict[str, Any], counted: Counted, process: subprocess.Popen[bytes], output: Path
    ) -> Measured:
        rate, spread = counted.figure()
        failure = counted.failure
        if not failure and rate == 0.0:
            code = process.returncode
            told = f"ended with exit code {code} before {WARM_UP_UPDATES} updates:"
            failure = "\n".join([told, *trial.last_lines(output)])
        return Measured(settings, rate, spread, counted.updates, counted.is_cut_short, failure)


class Counted:
    """The updates that the slowest rank has made, at each look."""

    def __init__(self) -> None:
        self.begun_at: float | None = None
        self.ends: dict[int, float] = {}
        """Update -> when it ended, as the first rank's record says (monotonic seconds)."""
        self.is_cut_short = False
        self.failure = ""

    @property
    def updates(self) -> int:
        return max(0, len(self.ends) - 1)

    def add(self, ranks: Sequence[Record], now: float) -> None:
        """One look at the records."""
        if not ranks:
            return
        first = ranks[0]
        count = len(first.step_ends_ns)
        for k, ns in enumerate(first.step_ends_ns):
            step = first.step - (count - 1 - k)
            if step >= WARM_UP_UPDATES:
                self.ends.setdefault(step, ns / 1e9)
        if self.begun_at is None and self.ends:
            self.begun_at = now

    def is_enough(self, measure_s: float, give_up_below: float) -> bool:
        """Whether more would not say more: the time is up, the figure is steady, or it is plainly too low."""
        if len(self.ends) < 2:
            return False
        times = sorted(self.ends.values())
        seen = times[-1] - times[0]
        rate, spread = self.figure()
        if seen >= measure_s / 4 and rate * (1 + 2 * spread) < give_up_below:
            self.is_cut_short = True
            return True
        if seen >= measure_s:
            return True
        return seen >= measure_s / 2 and len(times) >= 60 and spread < 0.01

    def figure(self) -> tuple[float, float]:
        """(updates per second, relative spread of the middle): from windows of equal numbers of updates."""
        known = sorted(self.ends.items())
        if len(known) < 2:
            return 0.0, 0.0
        size = max(1, len(known) // 12)
        marks = known[::size]
        rates = [(two[0] - one[0]) / (two[1] - one[1]) for one, two in pairwise(marks) if two[1] > one[1]]
        if not rates:
            return 0.0, 0.0
        if len(rates) < 4:
            return median(rates), (max(rates) - min(rates)) / median(rates) / 2
        low, middle, high = quantiles(rates, n=4)
        return middle, (high - low) / 2 / middle / len(rates) ** 0.5


def _ranks(launcher_pid: int) -> list[Record]:
    """The records of the launch's ranks that train, by rank."""
    found: list[Record] = []
    for base in (Path("/dev/shm"), Path(tempfile.gettempdir())):
        for folder in base.glob(f"allranks-*-{launcher_pid}/record"):
            found += [r for r in read_pages(folder) if r.role != Role.LOADER_WORKER and r.step > 0]
    return sorted(found, key=lambda record: record.rank)


def _environment(folder: Path) -> dict[str, str]:
    return {name: value for name, value in trial.environment(folder).items() if name != VARIABLE}


def _in_effect(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with suppress(OSError):
        for line in (folder / "in-effect.jsonl").read_text().splitlines():
            with suppress(ValueError):
                found |= json.loads(line)
    return found
