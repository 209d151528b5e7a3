"""Which lock file does a rank wait for, and who holds it?"""

from __future__ import annotations

import math
import os
import time
from pathlib import Path

from allranks.watch import proc
from allranks.watch.evidence import FileLock, Rank
from allranks.watch.stacks import is_inside, main_stack

MOST_LOCKS = 8
"""Which of several it waits for is not known: one that is held keeps all others from being called left behind."""
YOUNG_S = 1.0
SHARED_SYSTEMS = (
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "9p",
    "afs",
    "ceph",
    "lustre",
    "beegfs",
    "gpfs",
    "glusterfs",
    "fuse.sshfs",
    "fuse.glusterfs",
)


def file_lock_of(rank: Rank) -> FileLock | None:
    """The lock file that the rank waits for, if it waits for one."""
    main = main_stack(rank.stacks)
    if main is None:
        return None
    if is_inside(main.frames, "/file_baton.py"):
        return _build_lock(rank)
    if "lock" in rank.wchan and (found := proc.flock_waited_for(rank.pid)):
        path, owner = found
        return FileLock(path, _age(path), owner or None, bool(owner and proc.state(owner) not in ("", "Z")))
    return None


def _build_lock(rank: Rank) -> FileLock | None:
    """The lock of a torch extension's build directory; a live owner keeps it open."""
    root = proc.environment(rank.pid, "TORCH_EXTENSIONS_DIR")
    roots = (
        [Path(root)]
        if root
        else [Path(proc.environment(rank.pid, "HOME") or "/root", ".cache", "torch_extensions")]
    )
    locks = [p for r in roots for p in (*r.glob("lock"), *r.glob("*/lock"), *r.glob("*/*/lock"))]
    if not locks:
        return None
    owners = {str(p): proc.has_open(str(p)) for p in locks[:MOST_LOCKS]}
    path = next((p for p, owner in owners.items() if owner is not None), min(owners, key=_begun))
    is_alive: bool | None = owners[path] is not None
    is_hidden = proc.file_system(path) in SHARED_SYSTEMS or _is_of_another_user(path)
    if not is_alive and (is_hidden or _age(path) < YOUNG_S):
        is_alive = None  # another host may hold it, or a process whose files we may not see; or it is being made this moment
    return FileLock(path, _age(path), owners[path], is_alive)


def _is_of_another_user(path: str) -> bool:
    try:
        return os.geteuid() not in (0, Path(path).stat().st_uid)
    except OSError:
        return False


def _begun(path: str) -> float:
    try:
        return Path(path).stat().st_mtime
    except OSError:
        return math.inf


def _age(path: str) -> float:
    try:
        return max(0.0, time.time() - Path(path).stat().st_mtime)
    except OSError:
        return 0.0
