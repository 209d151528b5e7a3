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
    device = _parse(asked) if asked is not None else None
    if device is not None and device.type != "cuda":
        return device
    if not torch.cuda.is_available():
        if device is not None:
            raise StartError(
                "AR005",
                f"device={str(device)!r} was asked for, but torch {torch.__version__} sees no GPU",
                why=_visible(),
                fix="device=None takes what is there; allranks doctor will say more",
            )
        return torch.device("cpu")
    device = torch.device("cuda", _cuda_index(place, device))
    torch.cuda.set_device(device)
    return device


def _parse(asked: str | torch.device) -> torch.device:
    try:
        return torch.device(asked)
    except RuntimeError as error:
        raise StartError(
            "AR005", f"device={asked!r} is no device of torch", fix="'cpu', 'cuda', 'cuda:0', or None"
        ) from error


def _cuda_index(place: Place, asked: torch.device | None) -> int:
    count = torch.cuda.device_count()
    if asked is not None and asked.index is not None:
        if asked.index < count:
            return asked.index
        raise StartError(
            "AR005",
            f"device={str(asked)!r} was asked for, but this process sees {_gpus(count)}",
            why=_visible(),
            fix="device=None takes cuda:LOCAL_RANK",
        )
    index = place.local_rank
    if count == 1 and index > 0 and _has_own_gpu(place):
        return 0
    if index < count:
        return index
    raise StartError(
        "AR005",
        f"local rank {index} needs cuda:{index}, but this process sees {_gpus(count)}",
        why=f"{place.local_world_size} ranks on this node; {_visible()}",
        fix=f"--nproc {count} for one rank per GPU; device='cuda:0' if each rank was given a GPU of its own; or device='cpu'",
    )


def _has_own_gpu(place: Place) -> bool:
    """Whether Slurm gave each task one GPU of its own, which the task sees as cuda:0; not if the node has too few for that."""
    if "SLURM_STEP_ID" not in os.environ:
        return False
    on_node = os.environ.get("SLURM_GPUS_ON_NODE", "")
    return not on_node.isdigit() or int(on_node) >= place.local_world_size


def _gpus(count: int) -> str:
    return f"{count} GPU{'s' * (count != 1)}"


def _visible() -> str:
    return f"CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', '(not set)')}"


def backend_for(device: torch.device, asked: str | None = None) -> str:
    """NCCL for CUDA tensors with Gloo for CPU tensors beside it; Gloo alone on a CPU. NCCL never goes alone: headers are on the CPU."""
    if asked is not None and asked != "nccl":
        return asked
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" or asked == "nccl" else "gloo"
