"""How often is something said of jobs that are well? Runs healthy jobs for half an hour and counts verdicts.

    python bench/diagnosis/healthy.py [--minutes 30] [--load 2]

In turn: a plain script with long evaluations, checkpoints and slow first batches on 2 and 3 ranks; the same on 8 ranks beside
`--load` processes that only compute; the recipe digits.py; and the negative controls of tests/faults/quiet. A verdict is a line of
the launcher that begins with a code, or a file in the run directory's diagnosis/.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
LIMIT_S = 600


@dataclass(frozen=True)
class Job:
    """One kind of job that is well."""

    name: str
    ranks: int
    script: Path
    args: tuple[str, ...] = ()
    pause_s: float = 4.0
    steps: int = 60
    is_beside_load: bool = False


def jobs() -> list[Job]:
    own = HERE / "healthy_job.py"
    quiet = [
        Job(p.stem, int(re.findall(r"ranks (\d+)", p.read_text().split("\n", 1)[0])[0]), p)
        for p in sorted((ROOT / "tests" / "faults" / "quiet").glob("*.py"))
    ]
    return [
        Job("training with pauses", 2, own, pause_s=8),
        Job("eight ranks on a loaded machine", 8, own, pause_s=2, steps=25, is_beside_load=True),
        Job("digits", 2, ROOT / "recipes" / "digits.py", ("--epochs", "6")),
        Job("training with pauses, 3 ranks", 3, own, pause_s=4),
        *quiet,
        Job("eight ranks on a loaded machine", 8, own, pause_s=2, steps=25, is_beside_load=True),
    ]


@contextmanager
def load(count: int) -> Iterator[None]:
    """So many processes that only compute."""
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for one in spinning:
            one.kill()
            one.wait()


def run(job: Job, folder: Path) -> tuple[int | None, list[str], str]:
    """(exit code, verdicts, what was printed)."""
    env = {
        **os.environ,
        "ALLRANKS_HOME": str(folder / "home"),
        "HEALTHY_PAUSE_S": str(job.pause_s),
        "HEALTHY_STEPS": str(job.steps),
        "OMP_NUM_THREADS": "1",
    }
    command = [
        str(Path(sys.executable).parent / "allranks"),
        "run",
        "--nproc",
        str(job.ranks),
        str(job.script),
        *job.args,
    ]
    try:
        done = subprocess.run(
            command, cwd=folder, env=env, capture_output=True, text=True, errors="replace", timeout=LIMIT_S
        )
        code, text = done.returncode, done.stdout + done.stderr
    except subprocess.TimeoutExpired as error:
        code, text = None, str(error.stderr or "")
    said = re.findall(r"^AR\d{3} .*", text, re.M)
    kept = [p.name for p in folder.glob("home/*/diagnosis/*.json")]
    return code, said or kept, text


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--load", type=int, default=2)
    options = parser.parse_args()
    until = time.monotonic() + 60 * options.minutes
    began, total, ranks_s, wrong = time.monotonic(), 0, 0.0, Counter[str]()
    for job in itertools.cycle(jobs()):
        if time.monotonic() > until:
            break
        with tempfile.TemporaryDirectory() as folder, load(options.load if job.is_beside_load else 0):
            at = time.monotonic()
            code, said, text = run(job, Path(folder))
        seconds = time.monotonic() - at
        total += 1
        ranks_s += seconds * job.ranks
        wrong.update(line[:5] for line in said)
        print(
            f"{job.name:34} {job.ranks} ranks, {seconds:5.1f} s, exit {code}, {len(said)} verdicts {said or ''}",
            flush=True,
        )
        if said or code:
            print(text[-6000:], flush=True)
    minutes = (time.monotonic() - began) / 60
    print(
        f"{total} jobs in {minutes:.0f} minutes ({ranks_s / 60:.0f} rank-minutes): {sum(wrong.values())} verdicts {dict(wrong)}"
    )


if __name__ == "__main__":
    main()
