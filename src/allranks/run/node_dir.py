"""Where do this node's records and stop file live, and who removes what a killed launcher left there?

A folder in shared memory, named for the job and the agent, with a lock that the agent holds as long as it lives (a lock, not the pid:
containers may share the memory but not the pids). The guard removes the folder of an agent that was killed; where the guard
was killed too, the next launcher of the same user does.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

LOCK = "lock"
_NAME = re.compile(r"allranks-[0-9a-f]{12}-\d+")


def choose(job_id: str, env: Mapping[str, str]) -> Path:
    """The folder of this agent; /dev/shm, or the temporary folder where there is none."""
    shm = Path("/dev/shm")
    usable = shm.is_dir() and os.access(shm, os.W_OK)
    base = shm if usable else Path(env.get("TMPDIR") or tempfile.gettempdir())
    return base / f"allranks-{job_id}-{os.getpid()}"


def claim(folder: Path) -> int:
    """Make the folder and lock it; gives back the descriptor that holds the lock, -1 if it cannot be (the start will say why)."""
    remove_stale(folder.parent)
    try:
        folder.mkdir(mode=0o700)
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        return -1
    _lock(lock)
    return lock


def remove_stale(base: Path) -> None:
    """Remove our folders whose agent is gone. Others' and those without a lock are left alone."""
    for folder in base.glob("allranks-*-*") if base.is_dir() else ():
        with contextlib.suppress(OSError):
            if not _NAME.fullmatch(folder.name) or folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            lock = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                if _lock(lock):
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


def _lock(descriptor: int) -> bool:
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
