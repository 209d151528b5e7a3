"""What does the record cost a step? The same job with and without the probe, in turn, several rounds.

    python bench/watch/record_overhead.py [--ranks 1] [--rounds 5] [--steps 3000]

Prints, per variant, the fastest and the median chunk of 25 steps over all rounds, wall time and CPU time of rank 0's
main thread; then what the marks cost alone. On a machine that others load, the fastest chunks and the CPU time are
what can be compared.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import timeit
from pathlib import Path

HERE = Path(__file__).resolve().parent
BOOT = HERE.parents[1] / "src" / "allranks" / "record" / "boot"


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def run_once(num_ranks: int, steps: int, settings: dict[str, str]) -> dict[str, list[float]]:
    port = str(free_port())
    ranks = [
        subprocess.Popen(
            [sys.executable, str(HERE / "tiny_job.py")],
            stdout=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(num_ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "OMP_NUM_THREADS": "1",
                "STEPS": str(steps),
                "ALLRANKS_AGENT_PID": str(os.getpid()),
                **settings,
            },
        )
        for rank in range(num_ranks)
    ]
    said = [rank.communicate()[0] for rank in ranks]
    return json.loads(said[0])


def probe_settings(folder: str) -> dict[str, str]:
    return {"ALLRANKS_RECORD_DIR": folder, "PYTHONPATH": str(BOOT)}


def compare(num_ranks: int, rounds: int, steps: int) -> None:
    found: dict[str, list[dict[str, list[float]]]] = {"plain": [], "settings": [], "probe": []}
    for _ in range(rounds):
        found["plain"].append(run_once(num_ranks, steps, {}))
        torch_only = {"TORCH_FR_BUFFER_SIZE": "512", "TORCH_DISTRIBUTED_DEBUG": "INFO"}
        found["settings"].append(run_once(num_ranks, steps, torch_only))
        folder = tempfile.mkdtemp(dir="/dev/shm")
        try:
            found["probe"].append(run_once(num_ranks, steps, probe_settings(folder)))
        finally:
            shutil.rmtree(folder)
    print(f"{num_ranks} ranks, {rounds} rounds of {steps} steps, us per step")
    print(f"{'':10} {'wall min':>9} {'wall median':>12} {'cpu min':>9} {'cpu median':>12}")
    for name, rows in found.items():
        cells = [
            min(row[kind][0] for row in rows)
            if place == 0
            else statistics.median(row[kind][1] for row in rows)
            for kind in ("wall_us", "cpu_us")
            for place in (0, 1)
        ]
        print(f"{name:10} {cells[0]:9.1f} {cells[1]:12.1f} {cells[2]:9.1f} {cells[3]:12.1f}")


def marks_alone() -> None:
    from allranks.record import layout as at
    from allranks.record.lines import Lines
    from allranks.record.writer import Writer

    folder = tempfile.mkdtemp(dir="/dev/shm")
    writer = Writer()
    writer.open(folder)
    lines = Lines(writer)
    name = writer.string("name")
    costs = {
        "mark": lambda: writer.mark(at.FORWARD, name),
        "user's line": lambda: lines.here(1),
        "end_step": writer.end_step,
        "collective": lambda: writer.exit_collective(writer.enter_collective(name, name, shape=(3, 4))),
    }
    for what, function in costs.items():
        empty = min(timeit.repeat(lambda: None, number=20000, repeat=20))
        best = min(timeit.repeat(function, number=20000, repeat=20)) - empty
        print(f"{what:12} {best / 20000 * 1e6:6.2f} us")
    shutil.rmtree(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3000)
    options = parser.parse_args()
    compare(options.ranks, options.rounds, options.steps)
    marks_alone()
