"""How quick is a script with these settings? One trial: a launch of its own, looked at from outside, ended when enough is seen.

The steps are counted in the ranks' records, so a trial needs nothing of the script; it is stopped by its launcher (run/trial.py), which
leaves no process.
"""

from __future__ import annotations

import json
import math
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean, linear_regression, stdev
from typing import Any

from allranks.core.overrides import VARIABLE
from allranks.record.page import Record, Role, read_pages
from allranks.run import trial
from allranks.tune.search import Measured

WARM_UP_UPDATES = 5
"""Not counted: workers start, kernels are chosen, caches fill."""
POLL_S = 0.05
PARTS = 4
"""Of the time that was measured: how far their figures lie apart says how sure the whole is."""
LEAST_PER_PART = 3
_LATE_S = 15.0
_OF_ONE = 0.1  # how sure a single interval is taken to be


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
        start_s: Seconds in which a first, and later another update must have been seen.
        ends_at: Monotonic seconds at which the whole search is over; a trial begun shortly before has a few seconds more for it.
    """

    script: Script
    measure_s: float = 4.0
    start_s: float = 120.0
    ends_at: float = math.inf
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
            return self._measured(settings, counted, output)

    def _command(self, folder: Path, settings: dict[str, Any]) -> list[str]:
        given = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
        return trial.command(
            self.script.nproc, folder, [*given, *self.script.launch], [self.script.path, *self.script.args]
        )

    def _watch(self, process: subprocess.Popen[bytes], give_up_below: float) -> Counted:
        counted, begun = Counted(), time.monotonic()
        patience_s = min(self.start_s, max(self.ends_at - begun, _LATE_S))
        while process.poll() is None:
            time.sleep(POLL_S)
            now = time.monotonic()
            counted.add(_ranks(process.pid), now)
            if counted.is_enough(self.measure_s, give_up_below):
                return counted
            counted.failure = self._too_late(counted, begun, now, patience_s)
            if counted.failure:
                return counted
        if process.returncode or counted.updates < 1:  # it has ended by itself
            counted.failure = f"ended with exit code {process.returncode} after {counted.made} updates:"
        return counted

    def _too_late(self, counted: Counted, begun: float, now: float, patience_s: float) -> str:
        """Why to wait no longer; "" while there is hope."""
        if now > max(begun, counted.grew_at) + patience_s:
            more = "more " if counted.made else ""
            return f"no {more}updates in {patience_s:.0f} s, after {counted.made}:"
        if now > max(begun, self.ends_at) + _LATE_S:
            return f"the time is up, after {counted.made} updates:"
        return ""

    def _measured(self, settings: dict[str, Any], counted: Counted, output: Path) -> Measured:
        if counted.failure:
            return Measured(settings, 0.0, failure="\n".join([counted.failure, *trial.last_lines(output)]))
        rate, spread = counted.figure()
        return Measured(settings, rate, spread, counted.updates, counted.is_cut_short)


class Counted:
    """The updates of the first rank, which wait for all ranks' gradients, at each look."""

    def __init__(self) -> None:
        self.grew_at = 0.0
        self.ends: dict[int, float] = {}
        """Update -> when it ended, as the first rank's record says (monotonic seconds)."""
        self.made = 0
        self.is_cut_short = False
        self.failure = ""

    @property
    def updates(self) -> int:
        """Those that count."""
        return max(0, len(self.ends) - 1)

    def add(self, ranks: Sequence[Record], now: float) -> None:
        """One look at the records."""
        if not ranks:
            return
        first = ranks[0]
        if first.step > self.made:
            self.made, self.grew_at = first.step, now
        count = len(first.step_ends_ns)
        for k, ns in enumerate(first.step_ends_ns):
            step = first.step_ended - (count - 1 - k)
            if step >= WARM_UP_UPDATES:
                self.ends.setdefault(step, ns / 1e9)

    def is_enough(self, measure_s: float, give_up_below: float) -> bool:
        """Whether more would not say more: the time is up, the figure is steady, or it is plainly too low."""
        if self.updates < 1:
            return False
        times = sorted(self.ends.values())
        seen = times[-1] - times[0]
        if seen >= measure_s:
            return self.updates >= LEAST_PER_PART or seen >= 4 * measure_s
        if seen < measure_s / 4 or self.updates < PARTS * LEAST_PER_PART:
            return False
        rate, spread = self.figure()
        if rate * (1 + 2 * spread) < give_up_below:
            self.is_cut_short = True
            return True
        return seen >= measure_s / 2 and self.updates >= 60 and spread < 0.01

    def figure(self) -> tuple[float, float]:
        """(updates per second, how sure that is): the slope of the line through all updates, and of those through parts of them.

        Workers deliver their batches in bunches, so that a median of short intervals would show those within a bunch.
        """
        known = sorted(self.ends.items())
        if len(known) < 2:
            return 0.0, 0.0
        rate = _slope(known)
        size = len(known) // PARTS
        if size >= LEAST_PER_PART:
            rates = [_slope(known[k * size : (k + 1) * size + 1]) for k in range(PARTS)]
        else:
            rates = [(two[0] - one[0]) / (two[1] - one[1]) for one, two in pairwise(known)]
        spread = stdev(rates) / fmean(rates) / len(rates) ** 0.5 if len(rates) > 1 else _OF_ONE
        return rate, spread


def _slope(ends: Sequence[tuple[int, float]]) -> float:
    """Updates per second."""
    steps, times = zip(*ends, strict=True)
    return linear_regression(times, steps).slope


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
