"""What does `allranks run` cost a hand-written DDP job? The same job with and without the watcher, started once each and then in turn.

    python bench/watch/watched.py [--jobs tiny cnn lm] [--rounds 20] [--starts 3] [--ranks 2]

All of it is in the figure: marks, looks, the tick thread, the agent. A ratio is taken within a round, in which both do as many steps, one
after the other, in either order. Two processes of the same program differ by some percent for as long as they live (where their memory
lies), so each start is a pair of new ones, and the median over the starts counts.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
OVERHEAD = HERE.parent / "overhead"
sys.path.insert(0, str(OVERHEAD))

from turns import Job  # noqa: E402  # pyright: ignore[reportMissingImports]

STEPS = {"tiny": 300, "cnn": 12, "lm": 3}
"""In a turn: half a second or so."""


def start(job: str, ranks: int, home: str, *more: str) -> Job:
    """The job of raw.py under `allranks run`."""
    command = [
        str(Path(sys.executable).parent / "allranks"),
        "run",
        *more,
        "--nproc-per-node",
        str(ranks),
        str(OVERHEAD / "raw.py"),
    ]
    environment = {**os.environ, "JOB": job, "OMP_NUM_THREADS": "1", "ALLRANKS_HOME": home}
    return Job(" ".join(more) or "watched", [command], ranks, environment, OVERHEAD)


def pair(job: str, options: argparse.Namespace) -> tuple[list[float], list[float], float]:
    """Ratios of wall and of processor time, watched to not watched, of each round; and a step's ms without."""
    walls, works, plain = [], [], []
    with tempfile.TemporaryDirectory() as home:
        jobs = [start(job, options.ranks, home), start(job, options.ranks, home, "--no-watch")]
        try:
            for each in jobs:
                each.first_step()
                each.turn(STEPS[job])  # warm
            for number in range(options.rounds):
                found = {}
                for each in jobs if number % 2 else reversed(jobs):
                    found[each.name] = each.turn(STEPS[job])
                watched, without = found["watched"], found["--no-watch"]
                walls.append(watched[0] / without[0])
                works.append(watched[1] / without[1])
                plain.append(without[0])
        finally:
            for each in jobs:
                each.close()
    return walls, works, statistics.median(plain)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", nargs="+", choices=sorted(STEPS), default=["tiny", "cnn", "lm"])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    print("| job | ms a step, not watched | wall, watched to not | processor time, watched to not | starts |")
    print("|---|---|---|---|---|")
    for job in options.jobs:
        rows = [pair(job, options) for _ in range(options.starts)]
        wall, work = ([statistics.median(row[kind]) for row in rows] for kind in (0, 1))
        each = ", ".join(f"{a:.3f}/{b:.3f}" for a, b in zip(wall, work, strict=True))
        print(
            f"| {job} | {statistics.median(row[2] for row in rows):.3g} | **{statistics.median(wall):.3f}** "
            f"| {statistics.median(work):.3f} | {each} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
