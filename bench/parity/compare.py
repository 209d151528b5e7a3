"""What does each library make of a partial window, and of nine samples on two ranks? Prints a Markdown table.

bench/parity/run.sh            # makes an environment with the libraries, then runs this in it
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
TRUE_GRADIENT, TRUE_COUNT = 1.0, 9


def run_one(script: Path) -> list:
    """What one library says: name, version, gradients of the updates, samples counted."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(script),
    ]
    # One script at a time sees no GPU: the job is for two processes on a CPU everywhere.
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=HERE, env=env, timeout=300
    )
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            return json.loads(line.removeprefix("RESULT "))
    raise SystemExit(
        f"{script.name} gave no result (exit code {done.returncode})\n{done.stdout}\n{done.stderr}"
    )


def row(library: str, version: str, gradients: list[float], evaluated: int) -> str:
    """One line of the table."""
    partial = f"{gradients[1]:g}" if len(gradients) > 1 else "0 (no update)"
    return f"| {library} {version} | {gradients[0]:g} | {partial} | {evaluated} |"


def main() -> None:
    """All of them, allranks last."""
    print(
        "| library | gradient of the whole window | gradient of the partial window | 9 samples counted as |"
    )
    print("|---|---|---|---|")
    print(f"| one device, by definition | {TRUE_GRADIENT:g} | {TRUE_GRADIENT:g} | {TRUE_COUNT} |")
    for name in ("with_accelerate", "with_lightning", "with_ignite", "with_allranks"):
        print(row(*run_one(HERE / f"{name}.py")), flush=True)


if __name__ == "__main__":
    main()
