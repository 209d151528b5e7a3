"""How long is a step in each library? All started once, then in turn, round after round; medians, and ratios with their spread.

    python bench/overhead/compare.py --peers-python /tmp/peers-venv/bin/python --write-docs     what docs/speed.md shows, 10 minutes
    python bench/overhead/compare.py --jobs tiny --tools raw allranks solo --rounds 9 --ranks 4

A ratio is taken within a round, since other work on the machine changes from round to round. Figures go to bench/results/ as JSON.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from telling import keep, tables, write_docs
from turns import Failed, Job

HERE = Path(__file__).parent
SCRIPTS = {
    "solo": "solo.py",  # no communication: as many copies side by side as there are ranks
    "raw": "raw.py",
    "allranks": "allranks_.py",  # under `allranks run`: with record and watcher
    "allranks-torchrun": "allranks_.py",
    "allranks-network": "allranks_.py",  # gradients over loopback
    "accelerate": "accelerate_.py",
    "fabric": "fabric.py",
    "trainer": "trainer.py",
}
USUAL = ("solo", "raw", "allranks", "accelerate", "fabric", "trainer")
PEERS = ("accelerate", "fabric", "trainer")
STEPS = {
    "tiny": 150,
    "cnn": 8,
    "lm": 2,
}  # in a turn: a second at most, so that no watcher takes a waiting job for a silent one


def start(tool: str, job: str, ranks: int, pythons: dict[str, str], home: str) -> Job:
    """Start one library's job."""
    python, script = pythons[tool], str(HERE / SCRIPTS[tool])
    environment = {**os.environ, "JOB": job, "OMP_NUM_THREADS": "1", "ALLRANKS_HOME": home}
    environment["SHARED_MEMORY"] = "0" if tool == "allranks-network" else "1"
    if tool == "solo":
        commands = [[python, script]] * ranks
    elif tool == "allranks":
        commands = [[str(Path(python).parent / "allranks"), "run", "--nproc-per-node", str(ranks), script]]
    else:
        launch = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        commands = [[*launch, script]]
    return Job(tool, commands, ranks, environment, HERE)


def measure(
    job: str, tools: list[str], pythons: dict[str, str], options: argparse.Namespace
) -> dict[str, list[tuple[float, float]]]:
    """By tool, milliseconds per step of each round: wall, processor."""
    steps = options.steps or STEPS[job]
    jobs: dict[str, Job] = {}
    times: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as home:
        try:
            for tool in tools:
                made = start(tool, job, options.ranks, pythons, home)
                try:
                    made.first_step()
                    made.turn(max(4, steps // 2))  # warm
                except Failed as error:
                    print(f"left out: {error}", file=sys.stderr)
                    made.close()
                    continue
                jobs[tool], times[tool] = made, []
            for number in range(options.rounds):
                for tool in random.Random(number).sample(list(jobs), len(jobs)):
                    times[tool].append(jobs[tool].turn(steps))
        finally:
            for each in jobs.values():
                each.close()
    return times


def first_steps(pythons: dict[str, str], options: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds from the command to the end of the first step: torchrun with the hand-written loop, and allranks run, in turn."""
    found: dict[str, list[float]] = {"raw": [], "allranks": []}
    with tempfile.TemporaryDirectory() as home:
        for number in range(options.starts):
            for tool in random.Random(number).sample(list(found), 2):
                job = start(tool, "tiny", options.ranks, pythons, home)
                try:
                    found[tool].append(job.first_step())
                finally:
                    job.close()
    return found


def can_run(python: str, tool: str) -> bool:
    """Whether this Python has the tool's library."""
    module = "accelerate" if tool == "accelerate" else "lightning"
    look = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return subprocess.run([python, "-c", look], capture_output=True).returncode == 0


def main() -> None:
    """Run the rounds, print the tables, keep the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--jobs", nargs="+", default=["tiny", "cnn", "lm"], choices=list(STEPS))
    parser.add_argument("--tools", nargs="+", default=list(USUAL), choices=list(SCRIPTS))
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, help="in a turn; the job's own number if not given")
    parser.add_argument(
        "--starts", type=int, default=5, help="for the time to the first step; 0 leaves it out"
    )
    parser.add_argument("--peers-python", help="a Python with accelerate and lightning")
    parser.add_argument("--write-docs", action="store_true", help="put the tables into docs/speed.md")
    options = parser.parse_args()
    pythons = {
        t: options.peers_python if t in PEERS and options.peers_python else sys.executable for t in SCRIPTS
    }
    tools = [t for t in options.tools if t not in PEERS or can_run(pythons[t], t)]
    begun, load = time.monotonic(), [os.getloadavg()[0]]
    starts = first_steps(pythons, options) if options.starts else {}
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for job in options.jobs:
        found[job] = measure(job, tools, pythons, options)
        load.append(os.getloadavg()[0])
        print(f"{job}: {time.monotonic() - begun:.0f} s so far", file=sys.stderr)
    text = tables(found, starts, options.ranks, load)
    print(text)
    path = keep(found, starts, options.ranks, load, options.peers_python or sys.executable)
    print(f"\nkept in bench/results/{path.name}")
    if options.write_docs:
        write_docs(text, path)


if __name__ == "__main__":
    main()
