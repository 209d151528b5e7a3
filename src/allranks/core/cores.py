"""How many CPU cores may this process use? Affinity and the cgroup's quota, not what the machine has."""

from __future__ import annotations

import math
import os
from pathlib import Path


def usable_cores(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Cores this process may run on at once: the smaller of its affinity and its cgroup's CPU quota, at least 1."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # macOS
        cores = os.cpu_count() or 1
    quota = cpu_quota(proc, cgroup)
    return max(1, min(cores, math.ceil(quota)) if quota else cores)


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
