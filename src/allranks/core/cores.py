"""How many CPU cores may this process use? Affinity and the cgroup's quota, not what the machine has."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Sequence
from pathlib import Path


def usable_cores(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Cores this process may run on at once: the smaller of its affinity and its cgroup's CPU quota, at least 1."""
    cores = len(affinity())
    quota = cpu_quota(proc, cgroup)
    return max(1, min(cores, math.ceil(quota)) if quota else cores)


def affinity() -> frozenset[int]:
    """The numbers of the cores that the system lets this process run on."""
    try:
        return frozenset(os.sched_getaffinity(0))
    except AttributeError:  # macOS
        return frozenset(range(os.cpu_count() or 1))


def share_of_cores(mine: frozenset[int], on_this_host: Sequence[frozenset[int]], usable: int) -> float:
    """A rank's fair share of cores: one that it has for itself counts whole, one that it shares with others in part.

    Args:
        mine: This rank's affinity.
        on_this_host: The affinity of every rank on this host, this one's too: Slurm and mpirun may have bound each to cores of its own.
        usable: usable_cores(), which knows the cgroup's quota.
    """
    share = sum(1 / max(1, sum(core in other for other in on_this_host)) for core in mine)
    return min(share, usable / len(on_this_host)) if usable < len(mine) else share


def own_share(on_this_host: Sequence[frozenset[int]]) -> float:
    """This process' fair share of cores among the ranks of its host, of which it is one."""
    return share_of_cores(affinity(), on_this_host, usable_cores())


def is_core_for_each(on_this_host: Sequence[frozenset[int]], usable: int) -> bool:
    """Whether every rank of a host has a whole core's worth: bound to one of its own, or among enough of them."""
    shares = (share_of_cores(cores, on_this_host, usable) for cores in on_this_host)
    return min(shares, default=1.0) > 1 - 1e-6


def cpu_quota(proc: Path, cgroup: Path) -> float | None:
    """The CPU quota of this process' cgroup in cores (v2 first, then v1); None without one."""
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return None
    quotas: list[float] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            quotas += _quota_v2(cgroup, path)
        elif "cpu" in controllers.split(","):
            quotas += _quota_v1(cgroup / "cpu", path)
    return min(quotas, default=None)


def _parents(root: Path, path: str) -> list[Path]:
    # A limit may sit on any ancestor; inside a container the path may not exist below the mount, only the root.
    parts = [p for p in path.split("/") if p]
    return [root.joinpath(*parts[:n]) for n in range(len(parts), -1, -1)]


def _quota_v2(root: Path, path: str) -> list[float]:
    found: list[float] = []
    for folder in _parents(root, path):
        try:
            quota, period = (folder / "cpu.max").read_text().split()
        except (OSError, ValueError):
            continue
        if quota != "max":
            found.append(int(quota) / int(period))
    return found


def _quota_v1(root: Path, path: str) -> list[float]:
    found: list[float] = []
    for folder in _parents(root, path):
        try:
            quota = int((folder / "cpu.cfs_quota_us").read_text())
            period = int((folder / "cpu.cfs_period_us").read_text())
        except (OSError, ValueError):
            continue
        if quota > 0:
            found.append(quota / period)
    return found


def stand_back() -> None:
    """The calling thread takes no core from another when it wakes, but waits until one is free; its share stays the same.

    For threads that look on: a rank that makes room for one in the middle of a step keeps all others waiting. Threads and processes that
    it starts later do the same. A policy that the user chose (chrt) stays. Source: sched(7), SCHED_BATCH.
    """
    with contextlib.suppress(AttributeError, OSError):  # not on Linux; forbidden by a sandbox
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
