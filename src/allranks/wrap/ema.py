"""How is an exponential moving average of the weights kept, and used for evaluation? On torch.optim.swa_utils.AveragedModel."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from allranks.core.errors import UsageError
from allranks.wrap.model import Model, plain
from allranks.wrap.precision import blend_all


class Ema:
    """The moving average of one model, updated once per update; names are the plain module's.

    Args:
        model: A module, wrapped or not.
        decay: Weight of the past at every update, in [0, 1).
        warmup: Early on the average would remember mostly the initial weights: after t updates the decay is at most (1 + t) / (10 + t).
    """

    def __init__(self, model: nn.Module, *, decay: float = 0.999, warmup: bool = True) -> None:
        if not 0 <= decay < 1:
            raise UsageError("AR109", f"ema decay={decay}", fix="a decay in [0, 1), such as 0.999")
        self.model, self.decay, self.warmup = model, decay, warmup
        self.average = AveragedModel(plain(model), multi_avg_fn=self._blend, use_buffers=True)
        self.average.requires_grad_(False)

    def _blend(self, averages: Any, values: Any, num_averaged: Any) -> None:
        if not torch.is_floating_point(averages[0]):
            for average, value in zip(averages, values, strict=True):
                average.copy_(value)  # counters, such as batch norm's num_batches_tracked
            return
        decay = self.decay
        if self.warmup:
            t = int(num_averaged)
            decay = min(decay, (1 + t) / (10 + t))
        blend_all(list(averages), list(values), 1 - decay)

    @property
    def module(self) -> nn.Module:
        """The averaged copy, a plain module."""
        return self.average.module

    def update(self) -> None:
        """Take in the model's weights and buffers as they are now."""
        self.average.update_parameters(plain(self.model))

    def settle(self) -> None:
        """Take rank 0's buffers of the average, as for the model itself. Collective."""
        if isinstance(self.model, Model):
            from allranks.wrap.buffers import BufferSync

            BufferSync(self.module).settle()

    @contextlib.contextmanager
    def swapped(self) -> Iterator[None]:
        """Exchange the model's weights and buffers with the average's inside the block, and back."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        live = plain(self.model)
        pairs = [
            *zip(live.parameters(), self.module.parameters(), strict=True),
            *zip(live.buffers(), self.module.buffers(), strict=True),
        ]
        for a, b in pairs:
            a.data, b.data = b.data, a.data

    def state_dict(self) -> dict[str, Any]:
        """The average under plain names, and how many updates it has seen."""
        return {"module": self.module.state_dict(), "n_averaged": int(self.average.n_averaged)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What state_dict gave."""
        self.module.load_state_dict(state["module"])
        self.average.n_averaged.fill_(state["n_averaged"])
