"""How quick is the script in one setting? One trial, measured from inside by its own steps (bench/inside.py)."""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from allranks.bench.stable import blocks_of, uncertainty
from allranks.perf.breakdown import breakdown
from allranks.perf.history import NoHistory, read_history
from allranks.run import trial

_GRACE_S = 5.0  # after rank 0's result: the others leave, the launcher writes its last lines


@dataclass(frozen=True, slots=True)
class Setting:
    """What a trial runs on."""

    ranks: int
    strategy: str = "script"

    def __str__(self) -> str:
        return f"{self.ranks} rank{'s' * (self.ranks != 1)}, {self.strategy}"


@dataclass(frozen=True, slots=True)
class Wish:
    """What is to be measured."""

    script: str
    args: tuple[str, ...] = ()
    least_s: float = 3.0
    most_s: float = 8.0
    start_s: float = 180.0
    launch: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Measured:
    """One trial."""

    setting: Setting
    blocks: tuple[float, ...] = ()  # seconds per step
    samples_per_step: float | None = None  # over all ranks; None where no loader was seen
    rss_mb: float = 0.0  # of the largest rank
    cuda_mb: float | None = None
    exchange_s: float | None = None  # of a step: gradients on their way, and nothing else to do
    failure: str = ""

    @property
    def step_s(self) -> float:
        """Seconds per step."""
        return median(self.blocks)

    @property
    def sure(self) -> float:
        """Relative half width of it."""
        return uncertainty(self.blocks)


def try_once(setting: Setting, wish: Wish) -> Measured:
    """One trial of the script."""
    with tempfile.TemporaryDirectory(prefix="allranks-bench-") as name:
        folder = Path(name)
        output = folder / "output.txt"
        script = ["-m", "allranks.bench.inside", wish.script, *wish.args]
        arguments = trial.command(setting.ranks, folder, wish.launch, script)
        inside = {
            "folder": str(folder),
            "strategy": setting.strategy,
            "least_s": wish.least_s,
            "most_s": wish.most_s,
        }
        env = trial.environment(folder, {"ALLRANKS_BENCH": json.dumps(inside)})
        with trial.launched(arguments, env, output) as process:
            failure = _wait(process, folder, setting, wish)
        return _read(setting, folder, failure, output)


def _wait(process: subprocess.Popen[bytes], folder: Path, setting: Setting, wish: Wish) -> str:
    """Until all ranks have told what they measured; else what went wrong."""
    results = [folder / f"rank{rank}.json" for rank in range(setting.ranks)]
    deadline = time.monotonic() + wish.start_s + wish.most_s * 3
    told_at: float | None = None
    while process.poll() is None:
        time.sleep(0.05)
        now = time.monotonic()
        if told_at is None and results[0].exists():
            told_at = now
        if told_at is not None and now - told_at > _GRACE_S:
            return ""
        if now > deadline:
            return f"not enough steps within {wish.start_s + wish.most_s * 3:.0f} s"
    return (
        ""
        if results[0].exists()
        else f"ended with exit code {process.returncode} before anything was measured"
    )


def _read(setting: Setting, folder: Path, failure: str, output: Path) -> Measured:
    found: list[dict[str, Any]] = []
    for rank in range(setting.ranks):
        with suppress(OSError, ValueError):
            found.append(json.loads((folder / f"rank{rank}.json").read_text()))
    if not failure and (not found or len(found[0]["ends"]) < 2):
        failure = "fewer than two steps of an optimizer were seen"
    if failure:
        return Measured(setting, failure="\n".join([failure, *trial.last_lines(output)]))
    ends, known = found[0]["ends"], all(each["batches_known"] for each in found)
    samples = sum(each["samples"] / max(1, len(each["ends"]) - 1) for each in found)
    cuda = [each["cuda_mb"] for each in found if each["cuda_mb"] is not None]
    return Measured(
        setting,
        blocks=tuple(blocks_of(ends) or [(ends[-1] - ends[0]) / (len(ends) - 1)]),
        samples_per_step=samples if known and len(found) == setting.ranks else None,
        rss_mb=max(each["rss_mb"] for each in found),
        cuda_mb=max(cuda) if cuda else None,
        exchange_s=_exchange(folder / "run") if setting.ranks > 1 else 0.0,
    )


def _exchange(run_dir: Path) -> float | None:
    """Seconds of a step in which gradients were on their way and nothing else was done; None where that is not known."""
    try:
        found = breakdown(read_history(run_dir))
    except (NoHistory, OSError, ValueError, KeyError):
        return None
    ranks = [rank for rank in found.ranks if rank.steps]
    if not ranks or not all(rank.is_exchange_known for rank in ranks):
        return None
    mean = found.mean()
    return mean["exchange"] + mean["waiting"]
