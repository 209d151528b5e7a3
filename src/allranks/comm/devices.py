"""Which device does this rank compute on, and over which backend does it talk?"""

from __future__ import annotations

import os

import torch

from allranks.core.errors import StartError
from allranks.core.place import Place


def pick_device(place: Place, asked: str | torch.device | None = None) -> torch.device:
    """This rank's device, made current before any other CUDA call: the one asked for, cuda:LOCAL_RANK, or the CPU.

    Raises:
        StartError: AR005 the local rank is beyond the devices, or the device asked for is not there.
    """
    device = torch.device(asked) if asked is not None else None
    if device is not None and device.type != "cuda":
        return device
    if not torch.cuda.is_available():
        if device is not None:
            raise StartError(
                "AR005",
                f"device={str(device)!r} was asked for, but torch {torch.__version__} sees no GPU",
                fix="device=None takes what is there; allranks doctor will say more",
            )
        return torch.device("cpu")
    index = device.index if device is not None and device.index is not None else place.local_rank
    count = torch.cuda.device_count()
    if count == 1 and index > 0 and "SLURM_STEP_ID" in os.environ:
        index = 0  # Slurm gave each task one GPU of its own, which the task sees as cuda:0
    if index >= count:
        raise StartError(
            "AR005",
            f"local rank {place.local_rank} needs cuda:{index}, but this process sees {count} GPU{'s' * (count != 1)}",
            why=f"CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', '(not set)')}, {place.local_world_size} ranks on this node",
            fix=f"--nproc {count}, or device='cpu'",
        )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def backend_for(device: torch.device) -> str:
    """NCCL for CUDA tensors with Gloo for CPU tensors beside it; Gloo alone on a CPU."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
