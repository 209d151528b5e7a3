"""How near to the best of an exhaustive search does `allranks tune` come, from a bad start?

    python bench/tune/compare.py [--minutes 5] [--seconds 3] [--quick] [--out FILE]

Tunes bench/tune/job.py, then tries every combination of the values below, then measures what was found, the best of the grid and the
beginning again in turn. Prints one line of JSON; the figure that counts is `found over best`, the goal at least 0.95.
On a quiet machine of 2 cores: 5 minutes for tune and 5 for the rest. --quick tries only the first and last of the values, to see that
all of it works.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from allranks.tune.trial import Script, Trials

JOB = Path(__file__).with_name("job.py")
GRID = {"num_workers": (1, 2, 4, 8, 16), "threads": (1, 2), "bucket_cap_mb": (0.01, 1.0, 25.0)}


def main() -> None:
    """Tune, search everything, compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    grid = {name: (v[0], v[-1]) for name, v in GRID.items()} if given.quick else GRID
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "tuned.json"
        command = [sys.executable, "-c", "from allranks.cli import main; main()", "tune", "--nproc", "2"]
        command += ["--minutes", str(given.minutes), "--seconds", str(given.seconds), "--out", str(out)]
        subprocess.run([*command, "--only", ",".join(GRID), str(JOB)], check=True, stdout=sys.stderr)
        tuned = json.loads(out.read_text())
    trials = Trials(Script(str(JOB), nproc=2), measure_s=given.seconds)
    began = time.monotonic()
    rates: dict[tuple[float, ...], float] = {}
    for values in itertools.product(*grid.values()):
        measured = trials(dict(zip(grid, values, strict=True)), max(rates.values(), default=0.0) * 0.7)
        rates[values] = measured.rate
        print(values, round(measured.rate, 2), measured.failure, file=sys.stderr, flush=True)
    best = dict(zip(grid, max(rates, key=lambda v: rates[v]), strict=True))
    exhaustive_s = time.monotonic() - began
    found = tuned["best"]["settings"]
    again: dict[str, list[float]] = {"found": [], "best": [], "start": []}
    for _ in range(3):
        for name, settings in (("found", found), ("best", best), ("start", {})):
            again[name].append(trials(settings, 0.0).rate)
    middle = {name: median(values) for name, values in again.items()}
    result = {
        "found": found,
        "best": best,
        "updates per second": {name: round(rate, 2) for name, rate in middle.items()},
        "found over best": round(middle["found"] / middle["best"], 3),
        "found over start": round(middle["found"] / middle["start"], 2),
        "trials": {"tune": tuned["trials"], "exhaustive": len(rates)},
        "minutes": {"tune": round(tuned["seconds"] / 60, 1), "exhaustive": round(exhaustive_s / 60, 1)},
    }
    print(json.dumps(result))
    if given.out is not None:
        given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
