"""What does `allranks run` cost a hand-written DDP job? The same job with and without the watcher, started once each and then in turn.

    python bench/watch/watched.py [--jobs tiny cnn lm] [--rounds 7] [--starts 8] [--ranks 2]

All of it is in the figure: marks, looks, the tick thread, the agent. A ratio is taken within a round, in which both do as many steps, one
after the other, in either order. Two processes of the same program differ by some percent for as long as they live (where their
memory lies): so each start is of new ones, the mean over the starts counts, with how sure it is, and the job without the watcher is there
twice: what the second shows to the first is nothing but that.
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


def ratios(job: str, options: argparse.Namespace) -> tuple[dict[str, tuple[float, float]], float]:
    """Of one start, medians of rounds, wall and processor time: of the watched job to the mean of the two others, of the second of these
    to the first; and a step's ms in the first."""
    found: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as home:
        jobs = {
            name: start(job, options.ranks, home, *([] if name == "watched" else ["--no-watch"]))
            for name in ("without", "watched", "again")
        }
        try:
            for each in jobs.values():
                each.first_step()
                each.turn(STEPS[job])  # warm
            for number in range(options.rounds):
                for name in list(jobs) if number % 2 else list(jobs)[::-1]:
                    found.setdefault(name, []).append(jobs[name].turn(STEPS[job]))
        finally:
            for each in jobs.values():
                each.close()
    first, second = found["without"], found["again"]
    mean = [((a + c) / 2, (b + d) / 2) for (a, b), (c, d) in zip(first, second, strict=True)]
    out = {"watched": _ratio(found["watched"], mean), "again": _ratio(second, first)}
    return out, statistics.median(wall for wall, _ in first)


def _ratio(mine: list[tuple[float, float]], theirs: list[tuple[float, float]]) -> tuple[float, float]:
    pairs = list(zip(mine, theirs, strict=True))
    wall, work = (statistics.median(one[k] / other[k] for one, other in pairs) for k in (0, 1))
    return wall, work


def mean_of(values: list[float]) -> str:
    """The mean, and twice its standard error."""
    spread = 2 * statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return f"{statistics.fmean(values):.3f} +- {spread:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", nargs="+", choices=sorted(STEPS), default=["tiny", "cnn", "lm"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--starts", type=int, default=8)
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    print(
        "| job | ms a step, not watched | wall, watched to not | processor time | not watched, once more: wall | starts |"
    )
    print("|---|---|---|---|---|---|")
    for job in options.jobs:
        rows = [ratios(job, options) for _ in range(options.starts)]
        wall, work = ([of["watched"][k] for of, _ in rows] for k in (0, 1))
        again = [of["again"][0] for of, _ in rows]
        print(
            f"| {job} | {statistics.median(ms for _, ms in rows):.3g} | **{mean_of(wall)}** | {mean_of(work)} | {mean_of(again)} "
            f"| {', '.join(f'{w:.3f}' for w in wall)} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
