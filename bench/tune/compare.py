"""How near to the best of an exhaustive search does `allranks tune` come, from a bad start?

    python bench/tune/compare.py [--minutes 5] [--seconds 3]

Tunes bench/tune/job.py, then tries every combination of the values below, then measures what was found, the best of the grid and the
beginning again in turn. Prints one line of JSON; the figure that counts is `found over best`, the goal at least 0.95.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
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
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "tuned.json"
        command = [sys.executable, "-c", "from allranks.cli import main; main()", "tune", "--nproc", "2"]
        command += ["--minutes", str(given.minutes), "--seconds", str(given.seconds), "--out", str(out)]
        subprocess.run([*command, "--only", ",".join(GRID), str(JOB)], check=True, stdout=sys.stderr)
        tuned = json.loads(out.read_text())
    trials = Trials(Script(str(JOB), nproc=2), measure_s=given.seconds)
    rates: dict[tuple[float, ...], float] = {}
    for values in itertools.product(*GRID.values()):
        rates[values] = trials(
            dict(zip(GRID, values, strict=True)), max(rates.values(), default=0.0) * 0.7
        ).rate
        print(values, round(rates[values], 2), file=sys.stderr, flush=True)
    best = dict(zip(GRID, max(rates, key=lambda v: rates[v]), strict=True))
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
        "minutes of tune": round(tuned["seconds"] / 60, 1),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
