"""What do the tests that kill a job at random moments share: the seed, what a moment is, whether the job is still equal, the table?

ALLRANKS_SOAK_MOMENTS says how many moments (20), ALLRANKS_SOAK_SEED repeats a run, ALLRANKS_SOAK_LOG is a file to which each moment adds
a line; `python -m support.soak LOG` makes the table of it.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

MOMENTS = int(os.environ.get("ALLRANKS_SOAK_MOMENTS", "20"))
SEED = int(os.environ.get("ALLRANKS_SOAK_SEED", "0")) or random.SystemRandom().randrange(1, 2**32)
NUM_UPDATES, SAVE_STEPS = 300, 7
NUM_RANKS = 2


class Reference:
    """The job that was never stopped, with all its checkpoints."""

    def __init__(self, folder: Path) -> None:
        self.results = results(folder)
        self._saved = {step_of(place): values_of(place) for place in checkpoints(folder)}
        self._seen: set[Path] = set()

    def differs(self, folder: Path) -> str:
        """What of a killed job is not bit for bit this one's; "" if nothing is: its checkpoints, and its end if it has come to it."""
        for place in checkpoints(folder):
            if place in self._seen:
                continue
            try:
                step, values = step_of(place), values_of(place)
            except FileNotFoundError:  # no longer kept: the job goes on meanwhile
                continue
            wrong = [name for name in values if values[name] != self._saved.get(step, {}).get(name)]
            if wrong:
                return f"the checkpoint of step {step} has another {', '.join(wrong)}"
            self._seen.add(place)  # not again: only what is equal
        if is_complete(folder) and results(folder) != self.results:
            return "the end is another one"
        return ""


def checkpoints(folder: Path) -> list[Path]:
    """The finished checkpoints of a job."""
    return [place for place in (folder / "run" / "checkpoints").glob("step-*") if ".tmp-" not in place.name]


def step_of(place: Path) -> int:
    return json.loads((place / "manifest.json").read_text())["step"]


def values_of(place: Path) -> dict[str, str]:
    """A digest of each file's values: pickles of equal values differ in what their objects share."""
    found = {}
    for name, entry in json.loads((place / "manifest.json").read_text())["files"].items():
        is_pickle = name.endswith(".pt")
        found[name] = digest(torch.load(place / name, weights_only=True)) if is_pickle else entry["sha256"]
    return found


def digest(value: Any) -> str:
    """A hash of every bit of a nested value."""
    hashed = hashlib.sha256()

    def add(part: Any) -> None:
        hashed.update(type(part).__name__.encode())
        if isinstance(part, dict):
            for key, item in part.items():
                hashed.update(repr(key).encode())
                add(item)
        elif isinstance(part, (list, tuple)):
            for item in part:
                add(item)
        elif isinstance(part, torch.Tensor):
            hashed.update(part.contiguous().numpy().tobytes())
        else:
            hashed.update(repr(part).encode())

    add(value)
    return hashed.hexdigest()


def is_complete(folder: Path) -> bool:
    return all((folder / f"rank{rank}.json").exists() for rank in range(NUM_RANKS))


def results(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(NUM_RANKS)]


def standing(folder: Path, rank: int) -> tuple[int, int]:
    """Pid and updates of a rank; (0, 0) before its first word."""
    try:
        pid, updates = (folder / f"progress-{rank}").read_text().split()
    except FileNotFoundError:
        return 0, 0
    return int(pid), int(updates)


def wait_for_moment(
    folder: Path, rng: random.Random, before: tuple[int, ...], is_over: Callable[[], bool], start_s: float
) -> None:
    """Until a random moment of a new start: one in five while it starts, the others within 60 updates of its first.

    Args:
        before: The pids of the start before.
        is_over: Whether the job has ended by itself.
        start_s: About as long as a start takes.
    """
    if rng.random() < 0.2:
        time.sleep(rng.uniform(0, start_s))
        return
    more, jitter_s = rng.randrange(60), rng.uniform(0, 0.01)
    first = None
    while not is_over():
        pid, updates = standing(folder, 0)
        if pid and pid not in before and updates:
            first = updates if first is None else first
            if updates >= first + more:
                break
        time.sleep(0.002)
    time.sleep(jitter_s)


def pids(folder: Path) -> tuple[int, ...]:
    return tuple(standing(folder, rank)[0] for rank in range(NUM_RANKS))


def log(kind: str, where: str, differs: str, seconds: float) -> None:
    """Note one moment."""
    row = {"kind": kind, "where": where, "differs": differs, "seconds": round(seconds, 2), "seed": SEED}
    print(json.dumps(row), flush=True)
    if path := os.environ.get("ALLRANKS_SOAK_LOG"):
        with Path(path).open("a") as out:
            out.write(json.dumps(row) + "\n")


def table(rows: list[dict[str, Any]]) -> str:
    """Kind, moments, how many were equal, seconds of one (median), as Markdown."""
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    lines = [
        "| what was killed with SIGKILL | moments | bit-equal | seconds a moment, median |",
        "|---|---|---|---|",
    ]
    for kind in [*kinds, ""]:
        mine = [row for row in rows if kind in ("", row["kind"])]
        seconds = sorted(row["seconds"] for row in mine)
        equal = sum(not row["differs"] for row in mine)
        lines.append(f"| {kind or '**all**'} | {len(mine)} | {equal} | {seconds[len(seconds) // 2]:.1f} |")
    seeds = ", ".join(map(str, dict.fromkeys(row["seed"] for row in rows)))
    return "\n".join(
        [*lines, "", f"Seed {seeds}; {sum(row['seconds'] for row in rows) / 60:.0f} minutes in all."]
    )


if __name__ == "__main__":
    print(table([json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]))
