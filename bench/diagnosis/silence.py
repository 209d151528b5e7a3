"""Which mistakes that nobody notices are named, and how soon? Writes docs/silence.md, the table by kinds.

    python bench/diagnosis/silence.py [NAME ...]

Runs the scripts of tests/faults/scripts that are wrong in silence, and all of tests/faults/quiet, under `allranks run` on this
machine. With names, only these, and nothing is written.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from datetime import date
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from measure import ROOT, Row, measure  # the file beside this one

PAGE = ROOT / "docs" / "silence.md"
CASES = Path(__file__).parent / "silence_cases.md"

KINDS: dict[str, tuple[str, ...]] = {
    "data: the same samples on several ranks": (
        "seed_of_rank",
        "own_permutation",
        "listed_differently",
        "split_differs",
    ),
    "data: every rank reads the whole set": ("not_divided", "batches_not_divided", "not_split"),
    "data: the same order every epoch": ("no_set_epoch",),
    "data: shards without data": ("no_data",),
    "data: equal augmentation randomness": ("same_randomness",),
    "data: padded samples counted in an evaluation": ("padded",),
    "data: validation samples seen in training": ("leak",),
    "replicas: changed by hand": ("drifts",),
    "replicas: a step left out on one rank": ("leaves_out_a_step",),
    "replicas: trained through .module, always under no_sync": ("through_module", "always_no_sync"),
    "replicas: unfrozen after wrapping": ("unfrozen_later",),
    "replicas: learning rates that differ": ("rates_differ",),
    "replicas: buffers, codebooks": ("codebook",),
    "numbers: nan in loss, input, gradient": ("nan_loss", "nan_input", "gradient_not_finite"),
    "parameters without a gradient": ("never_trained", "unused_on_one", "unused_on_all"),
    "a scheduler stepped once per rank": ("scheduler_too_often",),
    "a checkpoint written by several ranks": ("one_path",),
}


def table(rows: dict[str, Row], quiet: dict[str, str]) -> str:
    """The page."""
    import torch

    full = sum(not r.told.problems for r in rows.values())
    revision = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    alarms = {name: said for name, said in quiet.items() if said}
    times = sorted(r.told.named_s for r in rows.values() if r.told.named_s is not None)
    out = [
        "# What is wrong in silence, and named",
        "",
        f"{full} of {len(rows)} jobs with such a mistake named in full (cause, ranks, line or parameter), {len(alarms)} of",
        f"{len(quiet)} jobs that are well given an alarm. Median {times[len(times) // 2]:.1f} s after the mistake; for data, after the",
        "passes that show it.",
        "",
        f"Measured {date.today()} at revision {revision} by `python bench/diagnosis/silence.py` on {os.cpu_count()} shared cores,",
        f"Python {platform.python_version()}, torch {torch.__version__}, gloo. Seconds: from the script's mark to the verdict.",
        "",
        "| kind | job | named | who and where | seconds | first line |",
        "|---|---|---|---|---|---|",
    ]
    for kind, names in KINDS.items():
        out += [_line(kind, rows[name]) for name in names if name in rows]
    out += ["", "## Jobs that are well", "", "| job | said |", "|---|---|"]
    out += [f"| {name} | {said or 'nothing'} |" for name, said in quiet.items()]
    return "\n".join(out) + "\n\n" + CASES.read_text()


def _line(kind: str, row: Row) -> str:
    told = row.told
    seconds = f"{told.named_s:.1f}" if told.named_s is not None else "-"
    ok = "yes" if not told.problems else "; ".join(told.problems)
    code = f"[{told.code}](causes/{told.code}.md)" if told.code else "-"
    head = told.head.replace("|", "\\|").replace(" on vm", "")[:150]
    return f"| {kind} | {row.fault.path.stem} | {code} | {ok} | {seconds} | {head} |"


def main() -> None:
    wanted = sys.argv[1:]
    scripts, well = ROOT / "tests" / "faults" / "scripts", ROOT / "tests" / "faults" / "quiet"
    rows: dict[str, Row] = {}
    for name in [n for names in KINDS.values() for n in names if not wanted or n in wanted]:
        rows[name] = measure(scripts / f"{name}.py")
        print(name, rows[name].told.head[:110], rows[name].told.problems, flush=True)
    quiet: dict[str, str] = {}
    for path in sorted(well.glob("*.py")):
        if not wanted or path.stem in wanted:
            quiet[path.stem] = measure(path, until_end=True).told.head
            print(path.stem, quiet[path.stem] or "silent", flush=True)
    if not wanted:
        PAGE.write_text(table(rows, quiet))


if __name__ == "__main__":
    main()
