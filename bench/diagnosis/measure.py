"""How many faults are named in full, and how soon? Writes docs/diagnosis.md.

    python bench/diagnosis/measure.py [NAME ...]

Runs each script of tests/faults/scripts under `allranks run` on this machine and notes the first verdict: its code,
whether the guilty rank and line are named, and the seconds from the fault to the line on the terminal.
With names, only these, and nothing is written.
"""

from __future__ import annotations

import os
import platform
import sys
import tempfile
from dataclasses import dataclass
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "faults")]

from running import Fault, Told, run  # noqa: E402 - found beside the tests

from support.command import Command, clean_env  # noqa: E402

PAGE = ROOT / "docs" / "diagnosis.md"


@dataclass(frozen=True)
class Row:
    """One fault."""

    fault: Fault
    told: Told


def measure(path: Path, *, until_end: bool = False) -> Row:
    """Run one, until its verdict or to its end."""
    fault = Fault.read(path)
    with tempfile.TemporaryDirectory() as folder:

        def start(*args: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None) -> Command:
            return Command(
                [*map(str, args)], cwd=cwd or Path(folder), env=clean_env(env), folder=Path(folder)
            )

        return Row(fault, run(fault, start, Path(folder), until_end=until_end))  # type: ignore[arg-type]  # the shape of StartCommand


def table(rows: list[Row]) -> str:
    """The page."""
    import torch

    full = sum(not r.told.problems for r in rows)
    times = sorted(r.told.named_s for r in rows if r.told.named_s is not None)
    out = [
        "# How faults are named",
        "",
        f"{full} of {len(rows)} faults named in full: the cause, the guilty rank, the guilty line where there is one. Median"
        f" {times[len(times) // 2]:.1f} s after the fault.",
        "",
        f"Measured {date.today()} by `python bench/diagnosis/measure.py` on {os.cpu_count()} shared cores, Python"
        f" {platform.python_version()}, torch {torch.__version__}, gloo. Seconds: from the script's mark to the verdict, polled"
        " every 50 ms; for faults before DDP is built they hold its construction.",
        "",
        "| fault | ranks | named | who and where | seconds | first line |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        told = row.told
        seconds = f"{told.named_s:.1f}" if told.named_s is not None else "-"
        ok = "yes" if not told.problems else "; ".join(told.problems)
        head = told.head.replace("|", "\\|")[:150]
        code = f"[{told.code}](causes/{told.code}.md)" if told.code else "-"
        out.append(f"| {row.fault.path.stem} | {row.fault.ranks} | {code} | {ok} | {seconds} | {head} |")
    return "\n".join(out) + "\n"


def main() -> None:
    scripts = ROOT / "tests" / "faults" / "scripts"
    names = sys.argv[1:]
    paths = [p for p in sorted(scripts.glob("*.py")) if p.stem != "job" and (not names or p.stem in names)]
    rows = []
    for path in paths:
        if missing := Fault.read(path).missing:
            print(path.stem, "left out: needs", missing, flush=True)
            continue
        rows.append(measure(path))
        print(path.stem, rows[-1].told.head[:110], rows[-1].told.problems, flush=True)
        if not names:
            PAGE.write_text(table(rows))
    if names:
        print(table(rows))


if __name__ == "__main__":
    main()
