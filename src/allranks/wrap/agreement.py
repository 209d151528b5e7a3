"""Did all ranks build the same model? Names, shapes, dtypes and what is trainable, compared before DDP would hang on it."""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist
from torch import nn

from allranks.comm.values import gather_objects
from allranks.core.errors import RanksDisagree


def describe(module: nn.Module) -> list[str]:
    """One line per parameter and buffer, in order: what must be equal on all ranks."""
    lines = [
        f"parameter {name} {list(p.shape)} {str(p.dtype).removeprefix('torch.')} {'trainable' if p.requires_grad else 'frozen'}"
        for name, p in module.named_parameters()
    ]
    return lines + [
        f"buffer {name} {list(b.shape)} {str(b.dtype).removeprefix('torch.')}"
        for name, b in module.named_buffers()
    ]


def require_same_model(module: nn.Module, name: str) -> None:
    """Compare the model with the other ranks'. Collective.

    Raises:
        RanksDisagree: AR280, on every rank, with the first difference and the two ranks that hold it.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    lines = describe(module)
    digest = hashlib.blake2b("\n".join(lines).encode(), digest_size=7).digest()
    mine = torch.tensor([int.from_bytes(digest, "big")], dtype=torch.int64)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    if all(torch.equal(every[0], other) for other in every):
        return
    models = gather_objects(lines)
    for rank, other in enumerate(models):
        if other != models[0]:
            raise RanksDisagree(
                "AR280",
                f"ranks 0 and {rank} built different models ({name}): {first_difference(models[0], other, rank)}",
                why=f"rank 0 has {len(models[0])} parameters and buffers, rank {rank} has {len(other)}",
                fix="build the model from settings that are the same on every rank, before anything that depends on the rank",
            )


def first_difference(zero: list[str], other: list[str], rank: int) -> str:
    """The first entry in which two descriptions part, in words."""
    for a, b in zip(zero, other, strict=False):
        if a != b:
            return f"rank 0 has {a}, rank {rank} has {b}"
    longer, who = (zero, 0) if len(zero) > len(other) else (other, rank)
    return f"only rank {who} has {longer[min(len(zero), len(other))]}"
