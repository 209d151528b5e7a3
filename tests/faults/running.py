"""How is a job with a fault run, and what did the launcher say of it?

The first line of a script tells what is expected: `# ranks 2; expect AR226; says rank 1 .*sleeps; guilty; limit 12`.
`expect`: the codes that are right; `says`: what the verdict's first line must match; `guilty`: a line marked #@guilty must be
named; `limit`: seconds after the fault strikes (6 if not given). Also used by bench/diagnosis.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from pathlib import Path

from support.command import StartCommand, command_path

HERE = Path(__file__).parent
START_LIMIT_S = 90.0


@dataclass(frozen=True)
class Fault:
    """One script and what must be said of it."""

    path: Path
    ranks: int
    codes: tuple[str, ...] = ()
    says: str = ""
    limit_s: float = 6.0
    guilty: tuple[int, ...] = ()

    @classmethod
    def read(cls, path: Path) -> Fault:
        """What the first line of a script tells."""
        lines = path.read_text().splitlines()
        words = {w.split(" ", 1)[0]: w.split(" ", 1)[-1] for w in lines[0].lstrip("# ").split("; ")}
        guilty = tuple(n for n, line in enumerate(lines, 1) if "#@guilty" in line)
        codes = tuple(words.get("expect", "").split())
        return cls(
            path, int(words["ranks"]), codes, words.get("says", ""), float(words.get("limit", 6)), guilty
        )


@dataclass
class Told:
    """What was seen."""

    code: str = ""
    head: str = ""
    text: str = ""
    named_s: float | None = None
    """From the fault to the verdict."""
    exit_code: int | None = None
    problems: list[str] = field(default_factory=list)


def run(fault: Fault, start: StartCommand, folder: Path, *, until_end: bool = False) -> Told:
    """Run the job until a verdict is given (or to its end), and say what is wrong with it."""
    mark = folder / "mark"
    env = {
        "FAULT_MARK": str(mark), "FAULT_DIR": str(folder), "TORCH_EXTENSIONS_DIR": str(folder),
        "ALLRANKS_HOME": str(folder / "home"), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1",
    }  # fmt: skip
    command = start(
        command_path("allranks"),
        "run",
        "--nproc",
        str(fault.ranks),
        fault.path,
        cwd=fault.path.parent,
        env=env,
    )
    told, began = Told(), time.monotonic()
    struck: float | None = None
    while command.process.poll() is None:
        now = time.monotonic()
        if struck is None and mark.exists():
            struck = now
        if not until_end and re.search(r"^ +more: ", command.err, re.M):
            break
        if now > (struck + fault.limit_s if struck and not until_end else began + START_LIMIT_S):
            break
        time.sleep(0.05)
    told.text, told.exit_code = command.err, command.process.poll()
    if found := re.search(r"^(AR\d{3}) .*", told.text, re.M):
        told.code, told.head = found[1], found[0]
        told.named_s = time.monotonic() - struck if struck else None
    command.kill_all()
    told.problems = problems(fault, told) if fault.codes else []
    return told


def problems(fault: Fault, told: Told) -> list[str]:
    """What the verdict lacks."""
    out = []
    if told.code not in fault.codes:
        out.append(f"says {told.code or 'nothing'}, expected {' or '.join(fault.codes)}")
    if not re.search(fault.says, told.head, re.I):
        out.append(f"the first line does not say {fault.says!r}")
    named = [n for n in fault.guilty if re.search(rf"{re.escape(fault.path.name)}:{n}\b", told.text)]
    if fault.guilty and not named:
        out.append(f"none of the guilty lines {fault.guilty} is named")
    return out
