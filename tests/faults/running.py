"""How is a job with a fault run, and what did the launcher say of it?

The first line of a script tells what is expected: `# ranks 2; expect AR226; says rank 1 .*sleeps; guilty; limit 12`.
`expect`: the codes that are right; `says`: what the verdict's first line must match; `guilty`: a line marked #@guilty must be
named; `tells`: what must stand somewhere in the verdict; `limit`: seconds after the fault strikes (6 if not given); `args`: given to the
script; `module`: started with -m; `needs`: what the machine must have (NEEDS); `end`: it is a remark in the summary at the end, no verdict.
Also used by bench/diagnosis.
"""

from __future__ import annotations

import os
import re
import shutil
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
    args: tuple[str, ...] = ()
    is_module: bool = False
    needs: str = ""
    is_at_end: bool = False
    tells: str = ""

    @classmethod
    def read(cls, path: Path) -> Fault:
        """What the first line of a script tells."""
        lines = path.read_text().splitlines()
        words = {w.split(" ", 1)[0]: w.split(" ", 1)[-1] for w in lines[0].lstrip("# ").split("; ")}
        guilty = tuple(n for n, line in enumerate(lines, 1) if "#@guilty" in line)
        codes = tuple(words.get("expect", "").split())
        return cls(
            path,
            int(words["ranks"]),
            codes,
            words.get("says", ""),
            float(words.get("limit", 6)),
            guilty,
            tuple(words.get("args", "").split()),
            "module" in words,
            words.get("needs", ""),
            "end" in words,
            words.get("tells", ""),
        )

    @property
    def missing(self) -> str:
        """What it needs that this machine has not; empty if it can be run."""
        return self.needs if self.needs and not NEEDS[self.needs]() else ""

    def command(self) -> list[str | Path]:
        """The words after the options of `allranks run`."""
        return ["-m", self.path.stem, *self.args] if self.is_module else [self.path, *self.args]


def _is_root() -> bool:
    return os.name == "posix" and os.geteuid() == 0


def _has_memory_groups() -> bool:
    version1 = Path("/sys/fs/cgroup/memory/cgroup.procs")
    version2 = Path("/sys/fs/cgroup/cgroup.subtree_control")
    writable = [p for p in (version1, version2) if p.exists() and os.access(p, os.W_OK)]
    return _is_root() and bool(writable) and (writable[0] == version1 or "memory" in version2.read_text())


def _has_loop_devices() -> bool:
    tools = all(shutil.which(t) for t in ("mkfs.ext4", "fsfreeze", "mount"))
    return _is_root() and tools and Path("/dev/loop-control").exists()


NEEDS = {"memory cgroups": _has_memory_groups, "loop devices": _has_loop_devices, "small shm": _is_root}
# A /dev/shm of its own, of 1 MiB, for the launcher and all it starts.
SMALL_SHM = ("unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=1m shm /dev/shm && exec "$@"', "sh")


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
        *(SMALL_SHM if fault.needs == "small shm" else ()),
        command_path("allranks"),
        "run",
        "--nproc",
        str(fault.ranks),
        *fault.command(),
        cwd=fault.path.parent,
        env=env,
    )
    until_end = until_end or fault.is_at_end
    told, began = Told(), time.monotonic()
    struck: float | None = None
    while command.process.poll() is None:
        now = time.monotonic()
        if struck is None and mark.exists():
            struck = now
        if not until_end and _has_said(fault, command.err):
            break
        if now > (struck + fault.limit_s if struck and not until_end else began + START_LIMIT_S):
            break
        time.sleep(0.05)
    told.text, told.exit_code = command.err, command.process.poll()
    if found := _said(fault, told.text):
        told.code, told.head = found[1] or found[2], found[0].strip().removeprefix("allranks: ")
        told.named_s = time.monotonic() - struck if struck else None
    command.kill_all()
    told.problems = problems(fault, told) if fault.codes else []
    return told


SAID = r"^(?:(AR\d{3})|(?:allranks:)? +(AR7\d{2})) .*"
"""A verdict; or, in the summary at the end, a remark on what is wrong in silence (what is slow is another matter)."""
BUSY = "AR800"
"""On a busy machine a rank may be slow beside what is wrong: this alone is not waited for, if something else is expected."""


def _said(fault: Fault, text: str) -> re.Match[str] | None:
    """What was said first; but of a remark at the end, and beside a straggler, what is expected."""
    if fault.is_at_end:
        return re.search(rf"^(?:allranks:)? +({'|'.join(fault.codes)})() .*", text, re.M)
    found = list(re.finditer(SAID, text, re.M))
    if not fault.codes or BUSY in fault.codes:
        return found[0] if found else None
    return next((one for one in found if one[1] != BUSY), found[0] if found else None)


def _has_said(fault: Fault, text: str) -> bool:
    """Whether a verdict is there, whole."""
    found = _said(fault, text)
    if found is None or (found[1] == BUSY and BUSY not in fault.codes):
        return False
    return re.search(r"^ +more: ", text[found.end() :], re.M) is not None


def problems(fault: Fault, told: Told) -> list[str]:
    """What the verdict lacks."""
    out = []
    if told.code not in fault.codes:
        out.append(f"says {told.code or 'nothing'}, expected {' or '.join(fault.codes)}")
    if not re.search(fault.says, told.head, re.I):
        out.append(f"the first line does not say {fault.says!r}")
    if not re.search(fault.tells, told.text):
        out.append(f"{fault.tells!r} is not told")
    named = [n for n in fault.guilty if re.search(rf"{re.escape(fault.path.name)}:{n}\b", told.text)]
    if fault.guilty and not named:
        out.append(f"none of the guilty lines {fault.guilty} is named")
    return out
