"""Which mistakes that nobody notices are named, and how soon? Writes docs/silence.md, the table by kinds.

    python bench/diagnosis/silence.py [NAME ...] [--keep FILE]

Runs the scripts of tests/faults/scripts that are wrong in silence, and all of tests/faults/quiet, under `allranks run` on this
machine: 6 to 8 minutes where nothing else runs. With names, only these, and nothing is written. --keep FILE (several, if wanted):
results are kept there as they come, and not measured again; the page says of which revisions they are.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from dataclasses import asdict
from datetime import date
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from measure import ROOT, Row, measure  # the file beside this one
from page import loads, revision, revisions
from running import Fault, Told

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
    "accumulation: the rest of a pass thrown away": ("left_over",),
    "gathers and means that cannot be right": ("one_tensor", "floored_mean", "own_entry"),
    "samples that count unequally": ("mean_of_means",),
    "names that match nothing": ("names_unmatched",),
    "a number of one rank logged as the job's": ("own_loss_logged", "own_share_logged"),
}


def table(rows: dict[str, Row], quiet: dict[str, str], kept: dict[str, dict]) -> str:
    """The page."""
    import torch

    full = sum(not r.told.problems for r in rows.values())
    alarms = {name: said for name, said in quiet.items() if said}
    times = sorted(
        r.told.named_s for r in rows.values() if r.told.named_s is not None and not r.fault.is_at_end
    )
    out = [
        "# What is wrong in silence, and named",
        "",
        f"{full} of {len(rows)} jobs with such a mistake named in full (cause, ranks, line or parameter), {len(alarms)} of",
        f"{len(quiet)} jobs that are well given an alarm. Median {times[len(times) // 2]:.1f} s after the mistake; for data, after the",
        "passes that show it.",
        "",
        f"Measured {date.today()} at {revisions(kept)} by `python bench/diagnosis/silence.py` on {os.cpu_count()} shared cores",
        f"({loads(kept)}), Python {platform.python_version()}, torch {torch.__version__}, gloo.",
        "Seconds: from the script's mark to the verdict.",
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
    if row.fault.is_at_end:
        seconds = "at the end"
    ok = "yes" if not told.problems else "; ".join(told.problems)
    code = f"[{told.code}](causes/{told.code}.md)" if told.code else "-"
    head = told.head.replace("|", "\\|").replace(" on vm", "")[:150]
    return f"| {kind} | {row.fault.path.stem} | {code} | {ok} | {seconds} | {head} |"


def main() -> None:
    given = argparse.ArgumentParser()
    given.add_argument("names", nargs="*")
    given.add_argument("--keep", action="append", type=Path, default=[])
    given.add_argument(
        "--write", action="store_true", help="write the page with what was kept, measure nothing"
    )
    options = given.parse_args()
    kept: dict[str, dict] = {}
    for file in options.keep:
        kept |= json.loads(file.read_text()) if file.exists() else {}
    scripts, well = ROOT / "tests" / "faults" / "scripts", ROOT / "tests" / "faults" / "quiet"
    faults = [scripts / f"{name}.py" for names in KINDS.values() for name in names]
    for path in [*faults, *sorted(well.glob("*.py"))]:
        if options.write or path.stem in kept or (options.names and path.stem not in options.names):
            continue
        began = time.monotonic()
        row = measure(path, until_end=path.parent == well)
        told = row.told
        took = round(time.monotonic() - began, 1)
        kept[path.stem] = {**asdict(told), "text": "", "revision": revision(), "load": row.load}
        print(f"{path.stem} ({took} s)", told.head[:110] or "silent", told.problems, flush=True)
        if options.keep:
            options.keep[0].write_text(json.dumps(kept))
    if not options.names:
        rows = {p.stem: _row(p, kept[p.stem]) for p in faults if p.stem in kept}
        quiet = {p.stem: kept[p.stem]["head"] for p in sorted(well.glob("*.py")) if p.stem in kept}
        PAGE.write_text(table(rows, quiet, kept))


def _row(path: Path, kept: dict) -> Row:
    told = Told(**{name: value for name, value in kept.items() if name in Told.__dataclass_fields__})
    return Row(Fault.read(path), told, kept.get("load", 0.0))


if __name__ == "__main__":
    main()
