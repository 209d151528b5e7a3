"""How many accelerators and cores does this node have, without importing torch?"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from allranks.core.cores import usable_cores
from allranks.core.errors import StartError


@dataclass(frozen=True, slots=True)
class Devices:
    """What this node offers."""

    num_gpus: int
    how: str
    """Where the number comes from, for messages."""
    num_cores: int
    """Cores this process may use."""


def find(env: Mapping[str, str], root: Path = Path("/")) -> Devices:
    """Count them. `root` is the file system's root (tests give another)."""
    num, how = _present(root)
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        if name in env and (num or name == "CUDA_VISIBLE_DEVICES"):
            visible = _visible(env[name])
            if num:
                visible = min(visible, num) if visible else 0
            return Devices(visible if num else 0, f"{name}={env[name]!r}", usable_cores())
    return Devices(num, how, usable_cores())


def _visible(text: str) -> int:
    """Entries before the first invalid one, as CUDA reads the list."""
    names: list[str] = []
    for name in filter(None, (part.strip() for part in text.split(","))):
        if name.startswith("-") or name == "NoDevFiles":
            break
        if name not in names:
            names.append(name)
    return len(names)


def _present(root: Path) -> tuple[int, str]:
    nodes = [p for p in (root / "dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", p.name)]
    if nodes:
        return len(nodes), "/dev/nvidia*"
    cards = list((root / "proc/driver/nvidia/gpus").glob("*"))
    if cards:
        return len(cards), "/proc/driver/nvidia/gpus"
    amd = [p for p in (root / "sys/class/kfd/kfd/topology/nodes").glob("*/properties") if _has_simds(p)]
    if amd:
        return len(amd), "/sys/class/kfd"
    if shutil.which("nvidia-smi"):
        return _ask_nvidia_smi(), "nvidia-smi -L"
    return 0, "no GPU driver found"


def _has_simds(properties: Path) -> bool:
    try:
        return bool(re.search(r"^simd_count [1-9]", properties.read_text(), re.M))
    except OSError:
        return False


def _ask_nvidia_smi() -> int:
    try:
        said = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return len(re.findall(r"^GPU \d+:", said.stdout, re.M))


def num_ranks(nproc: str, devices: Devices) -> int:
    """What --nproc means here.

    Raises:
        StartError: AR034 more ranks than GPUs, AR035 not a number of ranks, AR036 no GPU for --nproc gpu.
    """
    if nproc == "auto":
        return devices.num_gpus or 2
    if nproc == "cpu":
        return devices.num_cores
    if nproc in ("gpu", "cuda"):
        if not devices.num_gpus:
            raise StartError(
                "AR036",
                f"--nproc {nproc}, but this node has no GPU",
                why=devices.how,
                fix="--nproc 2 for ranks on the CPU",
            )
        return devices.num_gpus
    if not nproc.isdigit() or int(nproc) < 1:
        raise StartError(
            "AR035", f"--nproc {nproc} is not a number of ranks", fix="--nproc 2, or auto, gpu, cpu"
        )
    if 0 < devices.num_gpus < int(nproc):
        raise StartError(
            "AR034",
            f"--nproc {nproc}, but this node has {devices.num_gpus} GPU{'s' * (devices.num_gpus > 1)}",
            why=f"{devices.how}; two ranks cannot share a GPU under NCCL",
            fix=f"--nproc {devices.num_gpus}   (for ranks on the CPU: CUDA_VISIBLE_DEVICES= allranks run --nproc {nproc} ...)",
        )
    return int(nproc)
