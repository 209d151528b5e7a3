"""How are gradients averaged that DDP did not reduce during backward? After it, all at once, whatever the loop looked like.

Used where a window's last backward did not go through a synchronised forward: loops on `accumulate`, `backward` and `update`,
several backwards per update, calls of the plain module. Nothing overlaps, but it is right for every loop: the collectives depend on
the model's parameters alone.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

_CHUNK_BYTES = (
    32 << 20
)  # of one collective: large enough for bandwidth, small enough not to double the memory of a large model


def used_anywhere(parameters: list[torch.nn.Parameter], used: list[bool]) -> list[bool]:
    """For each parameter, whether some rank has a gradient for it. Collective."""
    flags = torch.tensor(used, dtype=torch.uint8)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    return [bool(f) for f in flags.tolist()]


def pool_gradients(parameters: list[torch.nn.Parameter]) -> None:
    """Average the gradients over the ranks in place. Collective.

    A parameter without a gradient on this rank counts as zero; one without a gradient on any rank keeps None, as on one device.
    """
    used = used_anywhere(parameters, [p.grad is not None for p in parameters])
    waiting = [p for p, u in zip(parameters, used, strict=True) if u]
    for p in waiting:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    for kind in dict.fromkeys((p.dtype, p.device) for p in waiting):
        _pool([p.grad for p in waiting if (p.dtype, p.device) == kind and p.grad is not None])


def _pool(grads: list[torch.Tensor]) -> None:
    world_size = dist.get_world_size()
    chunk: list[torch.Tensor] = []
    size = 0
    for i, grad in enumerate(grads):
        chunk.append(grad)
        size += grad.numel() * grad.element_size()
        if size < _CHUNK_BYTES and i + 1 < len(grads):
            continue
        flat = torch.cat([g.reshape(-1) for g in chunk]).div_(world_size)
        dist.all_reduce(flat)
        parts = flat.split([g.numel() for g in chunk])
        for part, g in zip(parts, chunk, strict=True):
            g.copy_(part.view_as(g))
        chunk, size = [], 0
