"""How near to the best of an exhaustive search does `allranks tune` come, from a bad start?

    python bench/tune/compare.py [--minutes 5] [--seconds 2] [--quick] [--out FILE] [--write-docs]

Tunes bench/tune/job.py as a user would, with tune's own values; then tries every combination of the values below, all of which tune may
take; then measures what was found, the two best of the grid and the beginning again in turn. Prints a table (--write-docs puts it into
docs/speed.md); the figure that counts is `found / best`, the goal at least 0.95. On a quiet machine of 2 cores: 3 minutes for tune and 5
for the rest. --quick tries only two values of each, to see that all of it works.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from allranks.cli import main as allranks
from allranks.tune.trial import Script, Trials
from allranks.tune.words import settings_text

JOB = Path(__file__).with_name("job.py")
SPEED = Path(__file__).parents[2] / "docs" / "speed.md"
GRID = {"num_workers": (16, 8, 4, 2, 1), "threads": (1, 2), "bucket_cap_mb": (25.0, 1.0, 0.01)}
START = {"num_workers": 1, "threads": 1, "bucket_cap_mb": 0.01}
ROUNDS = 3
BEGIN, END = "<!-- tune: begin -->", "<!-- tune: end -->"

Settings = dict[str, Any]


def main() -> None:
    """Tune, search everything, compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--write-docs", action="store_true")
    given = parser.parse_args()
    tuned = tune(given.minutes, given.seconds)
    trials = Trials(Script(str(JOB), nproc=2), measure_s=given.seconds)
    began = time.monotonic()
    rates = exhaustive(trials, {name: (v[0], v[-1]) for name, v in GRID.items()} if given.quick else GRID)
    minutes = (time.monotonic() - began) / 60
    result = {
        **compare(trials, tuned["best"]["settings"], rates),
        "trials": {"tune": tuned["trials"], "exhaustive": len(rates)},
        "minutes": {"tune": round(tuned["seconds"] / 60, 1), "exhaustive": round(minutes, 1)},
        "load": round(os.getloadavg()[1], 1),
        "date": time.strftime("%Y-%m-%d"),
        "command": f"python bench/tune/compare.py {' '.join(sys.argv[1:])}",
    }
    print(table(result))
    if given.out is not None:
        given.out.write_text(json.dumps(result, indent=1) + "\n")
    if given.write_docs:
        before, _, rest = SPEED.read_text().partition(BEGIN)
        SPEED.write_text(f"{before}{BEGIN}\n{table(result)}\n{END}{rest.partition(END)[2]}")


def tune(minutes: float, seconds: float) -> dict[str, Any]:
    """What `allranks tune` finds, as its JSON."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "tuned.json"
        command = ["tune", "--nproc", "2", "--minutes", str(minutes), "--seconds", str(seconds)]
        try:
            allranks([*command, "--only", ",".join(GRID), "--out", str(out), str(JOB)])
        except SystemExit as left:
            if left.code:
                raise
        return json.loads(out.read_text())


def exhaustive(trials: Trials, grid: dict[str, tuple[Any, ...]]) -> dict[str, tuple[float, Settings]]:
    """Updates per second of every combination; of those that are far behind, about."""
    rates: dict[str, tuple[float, Settings]] = {}
    for values in itertools.product(*grid.values()):
        settings = _shortest(dict(zip(grid, values, strict=True)))
        measured = trials(settings, 0.7 * max((rate for rate, _ in rates.values()), default=0.0))
        rates[settings_text(settings)] = measured.rate, settings
        told = f"{measured.rate:.2f} updates/s" if not measured.failure else measured.failure
        print(f"{settings_text(settings)}: {told}", file=sys.stderr, flush=True)
    return rates


def compare(trials: Trials, found: Settings, rates: dict[str, tuple[float, Settings]]) -> dict[str, Any]:
    """What was found, the two best of the grid and the beginning, in turn; one row for each of them."""
    best, second = sorted(rates.values(), key=lambda pair: pair[0], reverse=True)[:2]
    several = {settings_text(s): s for s in (found, best[1], second[1], {})}
    again: dict[str, list[float]] = {text: [] for text in several}
    for k in range(ROUNDS):
        for text, settings in list(several.items())[:: (-1) ** k]:
            again[text].append(trials(settings, 0.0).rate)
    middle = {text: median(each) for text, each in again.items()}
    of_grid = max(middle[settings_text(best[1])], middle[settings_text(second[1])])
    mine = middle[settings_text(found)]
    return {
        "found": settings_text(found),
        "best": settings_text(best[1]),
        "second": settings_text(second[1]),
        "updates per second": {t: [round(rate, 2) for rate in each] for t, each in again.items()},
        "found over best": round(mine / of_grid, 3),
        "found over start": round(mine / middle[settings_text({})], 2),
    }


def table(result: dict[str, Any]) -> str:
    """For docs/speed.md."""
    names = {result["second"]: "second of the grid", result["best"]: "best of the grid"}
    names |= {settings_text({}): "as it is", result["found"]: "found by tune"}
    both = " (also the best of the grid)" if result["found"] == result["best"] else ""
    rows = [
        f"| {names[text]}{both if text == result['found'] else ''} | {text} | {median(each):.1f} | {min(each):.1f} to {max(each):.1f} |"
        for text, each in result["updates per second"].items()
    ]
    trials, minutes = result["trials"], result["minutes"]
    took = f"tune made {trials['tune']} trials in {minutes['tune']} minutes, the grid {trials['exhaustive']} in {minutes['exhaustive']}"
    goal = "met" if result["found over best"] >= 0.95 else "NOT met"
    return "\n".join(
        [
            f"`{result['command']}`, {result['date']}, load {result['load']}: {took}.",
            "",
            f"| | settings | updates/s, median of {ROUNDS} in turn | least and most |",
            "|---|---|---|---|",
            *rows,
            "",
            f"found / best of the grid: **{result['found over best']:.3f}** (goal at least 0.95: {goal}); "
            f"found / as it is: **{result['found over start']:.2f}**.",
        ]
    )


def _shortest(settings: Settings) -> Settings:
    """Without what is as at the beginning, as tune names it."""
    return {name: value for name, value in settings.items() if value != START[name]}


if __name__ == "__main__":
    main()
