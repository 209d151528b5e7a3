"""Is the reason named for which a plain DDP script is slow, with numbers and what to change? Writes docs/slow.md.

    python bench/diagnosis/slow.py [KIND ...] [--seconds S] [--keep FILE] [--write]

Runs slow_job.py on 2 ranks under `allranks run`, once for each kind, and reads `allranks report --json`: 6 minutes where nothing else
runs. With kinds, only these, and nothing is written. --keep FILE: results are kept there as they come, and not measured again; --write:
only the page, from what was kept.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import date
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from page import ROOT, loads, revision, revisions  # the file beside this one

JOB, PAGE, CASES = (
    Path(__file__).with_name("slow_job.py"),
    ROOT / "docs" / "slow.md",
    Path(__file__).with_name("slow_cases.md"),
)
COMMAND = Path(sys.executable).with_name("allranks")
SHM = ("unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=76m shm /dev/shm && exec "$@"', "sh")


@dataclass(frozen=True)
class Kind:
    """One way to be slow."""

    what: str
    codes: tuple[
        str, ...
    ]  # one of them must be said; () = none but those of a busy host and of a step too short
    threads: int = 1
    before: tuple[str, ...] = ()


BUSY = {"AR805"}
"""True on a host that others use: no fault of the script."""
KINDS: dict[str, Kind] = {
    "loader_bound": Kind("samples that take 1 ms to read, one loader worker", ("AR801",)),
    "loader_work": Kind("samples that take 1.5 ms of a core, no loader worker", ("AR801",)),
    "workers": Kind("4 loader workers a rank that compute, on 2 cores", ("AR802",)),
    "threads": Kind("OMP_NUM_THREADS=4 on 2 cores, 2 ranks", ("AR803",), threads=4),
    "one_core": Kind("all ranks bound to core 0 by the script itself, 2 loader workers", ("AR804",)),
    "shm": Kind("a /dev/shm of 76 MB, batches of 6 MB", ("AR818",), before=SHM),
    "restarts": Kind("loader workers started anew for each pass of 8 steps", ("AR819",)),
    "one_bucket": Kind("bucket_cap_mb=512: one bucket", ("AR808",)),
    "many_buckets": Kind("bucket_cap_mb=0.02: a bucket a layer", ("AR808",)),
    "unused": Kind("find_unused_parameters=True, all are used", ("AR809",)),
    "buffers": Kind("132 buffers of batch norm sent before each forward", ("AR810",)),
    "print": Kind(".item() and print 600 times a step", ("AR813",)),
    "logging": Kind("200 scalars a step given to a SummaryWriter, on rank 0", ("AR800",)),
    "metrics": Kind("20 values all-reduced in each step", ("AR812",)),
    "no_sync": Kind("no_sync around the backward only", ("AR811",)),
    "short_steps": Kind("batches of 2", ("AR807",)),
    "checkpoint": Kind("64 MB saved by rank 0 every 20 steps", ("AR814", "AR800")),
    "first_batch": Kind("4 s for the first batch", ()),
    "slow_backward": Kind("rank 1's backward sleeps 20 ms before its first gradient", ("AR800",)),
    "slow_rank": Kind("rank 1 computes 40 ms more between forward and backward", ("AR800",)),
    "slow_disk": Kind("rank 1 reads each sample 1 ms longer", ("AR800", "AR801")),
    "healthy": Kind("nothing", ()),
}


def measure(name: str, kind: Kind, seconds: float) -> dict:
    """What the report of one run says."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [*kind.before, COMMAND, "run", "--nproc", "2", "--run-dir", run, JOB, name, str(seconds)]
        env = os.environ | {"OMP_NUM_THREADS": str(kind.threads), "TMPDIR": folder}
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=180 + seconds, check=False
        )
        told = subprocess.run([COMMAND, "report", run, "--json"], capture_output=True, text=True, check=False)
        times = (json.loads(told.stdout) if told.stdout else {}).get("times") or {}
        return {
            "exit_code": done.returncode,
            "causes": [{k: c[k] for k in ("code", "title", "fix", "share")} for c in times.get("causes", [])],
            "median_step_s": times.get("median_step_s", 0.0),
            "first_step_s": times.get("first_step_s", 0.0),
            "samples_per_s": times.get("samples_per_s"),
            "revision": revision(),
            "load": os.getloadavg()[0],
            "sums": [sum(r["parts_s"].values()) / r["step_s"] for r in times.get("ranks", []) if r["step_s"]],
        }


def is_named(kind: Kind, row: dict) -> bool:
    """Whether what must be said was said, or nothing where nothing must be."""
    said = {cause["code"] for cause in row["causes"]}
    return bool(said & set(kind.codes)) if kind.codes else not said - BUSY - {"AR807"}


def table(rows: dict[str, dict]) -> str:
    """The page."""
    import torch

    named = sum(is_named(KINDS[name], row) for name, row in rows.items())
    sums = [s for row in rows.values() for s in row["sums"]]
    out = [
        "# What makes a plain script slow, and named",
        "",
        f"{named} of {len(rows)} runs as they should be: the reason named, or nothing said where there is none. The parts of a step add",
        f"up to {min(sums):.3f} to {max(sums):.3f} of the step, on every rank of every run.",
        "",
        f"Measured {date.today()} at {revisions(rows)} by `python bench/diagnosis/slow.py` on {os.cpu_count()} shared cores",
        f"({loads(rows)}), Python {platform.python_version()}, torch {torch.__version__}, gloo, 2 ranks,",
        "one plain script (`bench/diagnosis/slow_job.py`).",
        "",
        "| what is slow | job | named | median step | what was said of it | what to change |",
        "|---|---|---|---|---|---|",
    ]
    out += [_line(name, row) for name, row in rows.items()]
    return "\n".join(out) + "\n\n" + CASES.read_text()


def _line(name: str, row: dict) -> str:
    kind = KINDS[name]
    causes = [c for c in row["causes"] if c["code"] in kind.codes] or ([] if kind.codes else row["causes"])
    first = causes[0] if causes else {"code": "", "title": "", "fix": ""}
    if name == "first_batch":
        first = {
            "code": "",
            "title": f"the first step took {row['first_step_s']:.1f} s; it is not counted",
            "fix": "",
        }
    code = f"[{first['code']}](causes/{first['code']}.md)" if first["code"] else "-"
    verdict = (
        code if is_named(kind, row) else f"no: {' '.join(c['code'] for c in row['causes']) or 'nothing'}"
    )
    title, fix = (str(first[k]).replace("|", "\\|").replace(" on vm", "") for k in ("title", "fix"))
    return (
        f"| {kind.what} | {name} | {verdict} | {row['median_step_s'] * 1e3:.1f} ms | {title} | {fix[:160]} |"
    )


def main() -> None:
    given = argparse.ArgumentParser()
    given.add_argument("kinds", nargs="*")
    given.add_argument("--seconds", type=float, default=8.0)
    given.add_argument("--keep", type=Path)
    given.add_argument("--write", action="store_true")
    options = given.parse_args()
    kept: dict[str, dict] = (
        json.loads(options.keep.read_text()) if options.keep and options.keep.exists() else {}
    )
    for name, kind in KINDS.items():
        if (
            options.write
            or (options.kinds and name not in options.kinds)
            or (name in kept and not options.kinds)
        ):
            continue
        began = time.monotonic()
        kept[name] = row = measure(name, kind, options.seconds)
        took = time.monotonic() - began
        said = ", ".join(f"{c['code']} {c['share']:.0%}" for c in row["causes"])
        print(
            f"{name} ({took:.1f} s): {'as it should be' if is_named(kind, row) else 'NOT NAMED'}: {said or 'nothing'}",
            flush=True,
        )
        if options.keep:
            options.keep.write_text(json.dumps(kept))
    if not options.kinds:
        PAGE.write_text(table({name: kept[name] for name in KINDS if name in kept}))


if __name__ == "__main__":
    main()
