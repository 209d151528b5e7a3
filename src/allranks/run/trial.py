"""How is a script launched for some seconds and ended, whatever it does? For `allranks tune` and `allranks bench`.

A trial is an `allranks run` of its own: a crash, an error or lack of memory costs one trial and is told as the end of its output.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from allranks.core.cores import usable_cores
from allranks.core.overrides import TRIAL

_LAUNCH = "import sys; from allranks.cli import main; main(sys.argv[1:])"
_LINES_SHOWN = 8
_AGAIN_S = 0.3  # between two signals; the second does not wait for a checkpoint
_PATIENCE_S = 8.0


def other_work() -> str:
    """What to say before the first trial of a machine that does other work, for which figures will be noisy; "" for none."""
    load, cores = os.getloadavg()[0], usable_cores()
    if load <= cores / 2:
        return ""
    return f"other work is on this machine, for which ranks will wait: a load of {load:.1f} on {cores} cores"


def command(nproc: int, folder: Path, options: Sequence[str], script: Sequence[str]) -> list[str]:
    """`allranks run` of a script with its arguments, whose run directory is in the trial's folder."""
    launch = [sys.executable, "-c", _LAUNCH, "run", "--nproc", str(nproc), "--run-dir", str(folder / "run")]
    return [*launch, *options, *script]


def environment(folder: Path, more: Mapping[str, str] | None = None) -> dict[str, str]:
    """This one; threads that an agent has set, and not the user, are set anew for the trial's number of ranks."""
    env = {**os.environ, TRIAL: str(folder), "ALLRANKS_HOME": str(folder), **(more or {})}
    if env.pop("ALLRANKS_OMP", "") == "agent":
        env.pop("OMP_NUM_THREADS", None)
    return env


@contextlib.contextmanager
def launched(
    arguments: Sequence[str], env: Mapping[str, str], output: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """The launch, for the block; afterwards it has ended.

    Args:
        arguments: See `command`.
        env: See `environment`.
        output: File for what it prints.
    """
    with output.open("wb") as file:
        process = subprocess.Popen(arguments, stdout=file, stderr=file, env=dict(env))
    try:
        yield process
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a launch; a launcher that must be killed has a guard, which removes what is left."""
    deadline = time.monotonic() + _PATIENCE_S
    while process.poll() is None and time.monotonic() < deadline:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_AGAIN_S)
    if process.poll() is None:
        process.kill()
        process.wait()


def last_lines(output: Path) -> list[str]:
    """The end of what was printed."""
    return output.read_text(errors="replace").strip().splitlines()[-_LINES_SHOWN:]
