"""Which lock file does a rank wait for, and who holds it?"""

from __future__ import annotations

import time
from pathlib import Path

from allranks.watch import proc
from allranks.watch.evidence import FileLock, Rank
from allranks.watch.stacks import is_inside, main_stack


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
    oldest = min(locks, key=lambda p: p.stat().st_mtime)
    owner = proc.has_open(str(oldest))
    return FileLock(str(oldest), _age(str(oldest)), owner, owner is not None)


def _age(path: str) -> float:
    try:
        return max(0.0, time.time() - Path(path).stat().st_mtime)
    except OSError:
        return 0.0
