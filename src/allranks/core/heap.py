"""Why does a training step on a CPU ask the kernel for its memory again each time, and how does it stop?

glibc gives memory back as soon as much of it is free: blocks above some MB when they are freed, and the top of the heap when it is twice
as large. In a training loop that is the end of every backward, and the next forward gets the same memory back page by page, each with a
fault and zeros: 3,000 to 5,000 faults a step of a small convolutional network, a tenth of its time. So what one step has used stays with
the process for the next one, up to a share of the host's memory. The most that is in use at a time does not change.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of malloc.h
_USERS_OWN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_")
# Larger blocks go to the kernel and back, as ever. Older releases of glibc refuse a threshold above the second.
_BLOCK_BYTES = (1 << 30, 1 << 25)
_MOST_BYTES = (1 << 31) - 1  # mallopt takes an int


def keep_freed_memory(local_world_size: int, environ: Mapping[str, str] = os.environ) -> int:
    """Let this process keep what it frees, up to a quarter of its share of the host's memory.

    What the user says with glibc's own variables (MALLOC_TRIM_THRESHOLD_, GLIBC_TUNABLES, ...) stays, and so does another C library.

    Returns:
        The most bytes that are kept; 0 if nothing was changed.
    """
    set_option = _mallopt()
    is_users = any(name in environ for name in _USERS_OWN) or "glibc.malloc" in environ.get(
        "GLIBC_TUNABLES", ""
    )
    if set_option is None or is_users:
        return 0
    most = min(usable_memory() // (4 * max(1, local_world_size)), _MOST_BYTES)
    # Setting either threshold also ends glibc's own adjusting of both, so what may be refused comes first: with the other alone, every
    # block above 128 KB would go back to the kernel.
    is_set = any(set_option(_MMAP_THRESHOLD, min(most, size)) for size in _BLOCK_BYTES)
    return most if is_set and set_option(_TRIM_THRESHOLD, most) else 0


def usable_memory(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that processes here may use: the host's, or less where a cgroup (a container, a Slurm job) has a limit."""
    most = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return most
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if controllers not in ("", "memory"):
            continue
        root = cgroup / controllers if controllers else cgroup
        name = "memory.limit_in_bytes" if controllers else "memory.max"
        parts = [p for p in path.split("/") if p]
        for depth in range(len(parts) + 1):  # any ancestor may have one
            most = min(most, _limit(root.joinpath(*parts[:depth]) / name, most))
    return most


def _limit(file: Path, otherwise: int) -> int:
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # not there, or "max"
        return otherwise


def _mallopt() -> Callable[[int, int], int] | None:
    """glibc's mallopt; None with another C library."""
    if sys.platform != "linux":
        return None
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version") or not hasattr(library, "mallopt"):
        return None
    return library.mallopt
