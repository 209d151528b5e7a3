"""How long is a step in each library? Interleaved rounds on this machine; medians, and ratios with their spread.

    python bench/overhead/compare.py                       all jobs, all tools that are installed, 5 rounds, 2 ranks
    python bench/overhead/compare.py --jobs tiny --tools raw allranks solo --rounds 9 --ranks 4
    python bench/overhead/compare.py --peers-python ../peers/bin/python     Accelerate and Lightning from an environment of their own

Every round runs each tool once, in another order each time; a ratio is taken within a round, since other work on the machine changes
from round to round. Results go to bench/results/ as JSON, the table to stdout.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
SCRIPTS = {
    "solo": "solo.py",  # no communication: as many copies side by side as there are ranks
    "raw": "raw.py",
    "allranks": "allranks_.py",
    "allranks-run": "allranks_.py",  # under `allranks run`: with record page and watcher
    "allranks-network": "allranks_.py",  # gradients over loopback
    "accelerate": "accelerate_.py",
    "fabric": "fabric.py",
    "trainer": "trainer.py",
}
PEERS = ("accelerate", "fabric", "trainer")


def run_once(tool: str, job: str, ranks: int, steps: int | None, pythons: dict[str, str]) -> float:
    """Milliseconds per step of one run."""
    python = pythons[tool]
    script = str(HERE / SCRIPTS[tool])
    with tempfile.TemporaryDirectory() as home:
        env = {**os.environ, "JOB": job, "OMP_NUM_THREADS": "1", "ALLRANKS_HOME": home}
        env["SHARED_MEMORY"] = "0" if tool == "allranks-network" else "1"
        if steps:
            env["STEPS"] = str(steps)
        if tool == "solo":
            commands = [([python, script], {**env, "RANK": str(rank)}) for rank in range(ranks)]
        elif tool == "allranks-run":
            command = [str(Path(python).parent / "allranks"), "run", "--nproc-per-node", str(ranks), script]
            commands = [(command, env)]
        else:
            launch = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
            commands = [([*launch, script], env)]
        running = [
            subprocess.Popen(c, env=e, cwd=HERE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            for c, e in commands
        ]
        outputs = [process.communicate(timeout=900)[0] for process in running]
    lines = [
        line[line.index("{") :] for text in outputs for line in text.splitlines() if '"ms_per_step"' in line
    ]
    if not lines:
        raise RuntimeError(f"{tool} on {job} gave no result:\n{outputs[0][-2000:]}")
    return float(json.loads(lines[0])["ms_per_step"])


def spread(values: list[float]) -> str:
    """Median and quartiles."""
    low, _, high = statistics.quantiles(values, n=4) if len(values) > 2 else (min(values), 0, max(values))
    return f"{statistics.median(values):.3g} ({low:.3g} to {high:.3g})"


def table(times: dict[str, list[float]], against: str) -> str:
    """One row per tool: ms per step, and the ratio to `against` within each round."""
    rows = [f"| tool | ms per step | x {against} |", "|---|---|---|"]
    for tool, values in times.items():
        ratios = [v / a for v, a in zip(values, times[against], strict=True)]
        rows.append(f"| {tool} | {spread(values)} | {spread(ratios)} |")
    return "\n".join(rows)


def main() -> None:
    """Run the rounds, print the tables, keep the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--jobs", nargs="+", default=["tiny", "cnn", "lm"])
    parser.add_argument("--tools", nargs="+", default=list(SCRIPTS), choices=list(SCRIPTS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, help="per run; the job's own number if not given")
    parser.add_argument("--peers-python", help="a Python with accelerate and lightning")
    options = parser.parse_args()
    pythons = {
        t: options.peers_python if t in PEERS and options.peers_python else sys.executable for t in SCRIPTS
    }
    tools = [t for t in options.tools if t not in PEERS or can_run(pythons[t], t)]
    against = "raw" if "raw" in tools else tools[0]
    found: dict[str, dict[str, list[float]]] = {}
    load = [os.getloadavg()[0]]
    for job in options.jobs:
        times: dict[str, list[float]] = {tool: [] for tool in tools}
        for number in range(options.rounds):
            for tool in random.Random(number).sample(tools, len(tools)):
                times[tool].append(run_once(tool, job, options.ranks, options.steps, pythons))
            load.append(os.getloadavg()[0])
        found[job] = times
        print(
            f"\n{job}, {options.ranks} ranks, {options.rounds} rounds\n\n{table(times, against)}", flush=True
        )
    keep(found, options, load)


def can_run(python: str, tool: str) -> bool:
    """Whether this Python has the tool's library."""
    module = "accelerate" if tool == "accelerate" else "lightning"
    return subprocess.run([python, "-c", f"import {module}"], capture_output=True).returncode == 0


def keep(found: dict[str, dict[str, list[float]]], options: argparse.Namespace, load: list[float]) -> None:
    """Write what was measured, where, and how busy the machine was."""
    import torch

    folder = HERE.parent / "results"
    folder.mkdir(exist_ok=True)
    path = folder / f"overhead-{time.strftime('%Y%m%d-%H%M%S')}.json"
    story = {
        "command": "python bench/overhead/compare.py " + " ".join(sys.argv[1:]),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Linux {platform.release()}",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "load_average": [round(x, 1) for x in load],
        "ranks": options.ranks,
        "ms_per_step": found,
    }
    path.write_text(json.dumps(story, indent=1) + "\n")
    print(f"\nload average {min(load):.1f} to {max(load):.1f}; kept in bench/results/{path.name}")


if __name__ == "__main__":
    main()
