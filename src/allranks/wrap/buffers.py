"""When do buffers have to be made equal on all ranks, and which?

A replica's running statistics (batch norm) are not read while it trains, so broadcasting them in every forward, as DDP does by
default, buys nothing until somebody evaluates or saves: rank 0's chain of updates is the same either way. They are broadcast then.
Other buffers that a forward changes (codebooks, spectral norm's vectors) are read in the next forward: those are found by
looking after the first update, and broadcast after every update. Constant buffers cost nothing.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _NormBase  # the public BatchNorm classes have no public base

from allranks.core.errors import warn_once


class BufferSync:
    """Keeps one module's buffers equal to rank 0's, at the moments that need it."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.changing: list[str] = []  # broadcast after every update
        self._versions: dict[str, tuple[int, int]] | None = None

    def _owners(self) -> list[tuple[str, nn.Module, str]]:
        return [
            (f"{path}.{name}" if path else name, owner, name)
            for path, owner in self.module.named_modules()
            for name, buffer in owner._buffers.items()
            if buffer is not None
        ]

    def _look(self) -> dict[str, tuple[int, int]]:
        # _version counts in-place changes of a tensor; a buffer assigned anew is another object.
        return {
            path: (id(owner._buffers[name]), getattr(owner._buffers[name], "_version", 0))
            for path, owner, name in self._owners()
            if not isinstance(owner, _NormBase)
        }

    def note(self) -> None:
        """Before the first forward of training: what the buffers are like untouched."""
        if self._versions is None:
            self._versions = self._look()

    def find_changing(self) -> None:
        """After an update: agree on the buffers that some rank's forward changed. Collective."""
        now, before = self._look(), self._versions or {}
        if not now:
            return
        names = sorted(now)
        changed = torch.tensor([int(now[n] != before.get(n, now[n])) for n in names], dtype=torch.int32)
        if dist.is_initialized():
            dist.all_reduce(changed, op=dist.ReduceOp.MAX)
        self.changing = [n for n, c in zip(names, changed.tolist(), strict=True) if c]
        self._versions = now
        if self.changing:
            warn_once(
                "AR110",
                f"buffer{'s' * (len(self.changing) != 1)} {', '.join(self.changing[:4])} change{'s' * (len(self.changing) == 1)} in "
                "forward: after each update every rank takes rank 0's, and what the other ranks computed is dropped; "
                "all-reduce what it is computed from in the forward, and this goes away",
            )

    def after_update(self) -> None:
        """Broadcast the buffers the next forward will read. Collective where there are any; usually none."""
        if self.changing:
            buffers = dict(self.module.named_buffers())
            self._broadcast([buffers[n] for n in self.changing if n in buffers])

    def settle(self) -> None:
        """Make all buffers rank 0's, before evaluating or saving. Collective."""
        self._broadcast([b for b in self.module.buffers() if b is not None])

    def _broadcast(self, buffers: list[torch.Tensor]) -> None:
        if not buffers or not dist.is_initialized() or dist.get_world_size() == 1:
            return
        for dtype in dict.fromkeys(b.dtype for b in buffers):
            same = [b for b in buffers if b.dtype == dtype]
            flat = torch.cat([b.detach().reshape(-1) for b in same])
            if flat.numel() == 0:
                continue
            dist.broadcast(flat, src=0)
            with torch.no_grad():
                for buffer, part in zip(same, flat.split([b.numel() for b in same]), strict=True):
                    buffer.copy_(part.view_as(buffer))
