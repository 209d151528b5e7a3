"""How does a gradient find its way back through a gather? To the rank that each row came from, summed over all who used it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from allranks.comm import values


def gather_rows(tensor: torch.Tensor) -> list[torch.Tensor]:
    """As values.gather_rows; where `tensor` needs a gradient on this rank, the backward is **collective** too.

    A loss over gathered rows that all ranks compute alike gets the gradient of one device: each rank's rows receive the sum of what all
    ranks' losses say about them, and the average over ranks that follows divides by their number.
    """
    if values.world_size() == 1:
        return [tensor if tensor.ndim else tensor.reshape(1)]
    if not (tensor.requires_grad and torch.is_grad_enabled()):
        return values.gather_rows(tensor)
    return list(_Gathered.apply(tensor if tensor.ndim else tensor.reshape(1)))


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> Any:
        parts = values.gather_rows(tensor)
        ctx.rows = [part.shape[0] for part in parts]
        # Its own part must not be the input itself: autograd takes an output that is an input for a view of it.
        return tuple(part.clone() for part in parts)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        every = torch.cat(grads)
        dist.all_reduce(every)
        return every.split(ctx.rows)[dist.get_rank()]
