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
STANDS_STILL = range(200, 340)
"""Codes of jobs that end or stand still; the others go on, and are told when enough has been seen."""
SOON_S = 2.0
WHY_LATER = {
    "stale_lock": "ranks that all sleep are looked at after 1.5 s",
    "shm_full": "from the mark before the loader's workers are started, which fill it with their first batches",
    "versions_differ": "ranks that all wait in init_process_group are looked at after 3 s",
    "group_timeout": "from the mark to the group's own timeout, which the script sets to a few seconds",
    "store_not_there": "the store may still be on its way: ranks that stand where nobody listens are given 2.5 s",
}
"""What of the time is a rule of ours, or the script's own."""


@dataclass(frozen=True)
class Row:
    """One fault."""

    fault: Fault
    told: Told
    load: float
    """One minute's load of the machine when it was named."""

    @property
    def stands_still(self) -> bool:
        """Whether the job ends or stands still of it."""
        return bool(self.fault.codes) and int(self.fault.codes[0][2:]) in STANDS_STILL


def measure(path: Path, *, until_end: bool = False) -> Row:
    """Run one, until its verdict or to its end."""
    fault = Fault.read(path)
    with tempfile.TemporaryDirectory() as folder:

        def start(*args: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None) -> Command:
            return Command(
                [*map(str, args)], cwd=cwd or Path(folder), env=clean_env(env), folder=Path(folder)
            )

        told = run(fault, start, Path(folder), until_end=until_end)  # type: ignore[arg-type]  # the shape of StartCommand
        return Row(fault, told, os.getloadavg()[0])


def page(rows: list[Row]) -> str:
    """The page."""
    import torch

    full = sum(not r.told.problems for r in rows)
    still, going = [r for r in rows if r.stands_still], [r for r in rows if not r.stands_still]
    loads = [r.load for r in rows]
    out = [
        "# How faults are named",
        "",
        f"{full} of {len(rows)} faults named in full: the cause, the guilty rank, the guilty line where there is one.",
        "",
        f"Measured {date.today()} by `python bench/diagnosis/measure.py` on {os.cpu_count()} shared cores (one minute's load"
        f" {min(loads):.1f} to {max(loads):.1f}), Python {platform.python_version()}, torch {torch.__version__}, gloo. Seconds: from"
        " the script's mark, which it sets as the fault strikes, to the verdict on the terminal, polled every 50 ms.",
        "",
    ]
    if still:
        out += [f"## Jobs that end or stand still: {_times(still)}", "", *table(still), "", *_later(still)]
    if going:
        out += [
            f"## Jobs that go on: {_times(going)}",
            "",
            "Slow ranks, and what is wrong in silence. The time holds what must be seen first: a window of some seconds, a pass over"
            " the data, a check of the replicas, or the end of the job. See [silence](silence.md) and [slow](slow.md).",
            "",
            *table(going),
        ]
    return "\n".join(out).rstrip("\n") + "\n"


def _times(rows: list[Row]) -> str:
    times = sorted(r.told.named_s for r in rows if r.told.named_s is not None)
    within = sum(t <= SOON_S for t in times)
    return (
        f"median {times[len(times) // 2]:.1f} s, {within} of {len(rows)} within {SOON_S:.0f} s"
        if times
        else "none named"
    )


def table(rows: list[Row]) -> list[str]:
    """A line for each fault."""
    out = ["| fault | ranks | named | who and where | seconds | first line |", "|---|---|---|---|---|---|"]
    for row in rows:
        told = row.told
        seconds = f"{told.named_s:.1f}" if told.named_s is not None else "-"
        ok = "yes" if not told.problems else "; ".join(told.problems)
        head = told.head.replace("|", "\\|")[:150]
        code = f"[{told.code}](causes/{told.code}.md)" if told.code else "-"
        out.append(f"| {row.fault.path.stem} | {row.fault.ranks} | {code} | {ok} | {seconds} | {head} |")
    return out


def _later(rows: list[Row]) -> list[str]:
    late = [r for r in rows if r.told.named_s is None or r.told.named_s > SOON_S]
    if not late:
        return []
    lines = [
        f"- {r.fault.path.stem}: {WHY_LATER.get(r.fault.path.stem) or f'no rule of ours; the load was {r.load:.1f}'}"
        for r in late
    ]
    return [f"Later than {SOON_S:.0f} s:", "", *lines, ""]


def main() -> None:
    scripts = ROOT / "tests" / "faults" / "scripts"
    names = sys.argv[1:]
    known = {p.stem: p for p in sorted(scripts.glob("*.py")) if p.stem != "job"}
    if unknown := [n for n in names if n not in known]:
        sys.exit(f"no fault of the name {', '.join(unknown)} in {scripts.relative_to(ROOT)}\n{__doc__}")
    paths = [known[n] for n in names or known]
    rows = []
    for path in paths:
        if missing := Fault.read(path).missing:
            print(path.stem, "left out: needs", missing, flush=True)
            continue
        rows.append(measure(path))
        print(path.stem, rows[-1].told.head[:110], rows[-1].told.problems, flush=True)
        if not names:
            PAGE.write_text(page(rows))
    if names:
        print(page(rows))


if __name__ == "__main__":
    main()
