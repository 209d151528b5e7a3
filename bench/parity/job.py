"""The small job that every library does: one weight, ten samples of 1.0 to train on, nine to evaluate.

The loss is weight x sample, so the gradient of every batch is exactly 1.0 whatever the weight is, and with SGD at a learning rate of 1
each update's gradient is what the weight lost.
"""

from __future__ import annotations

import json

import torch
from torch import nn
from torch.utils.data import TensorDataset

ACCUMULATION_STEPS = 4
"""Micro-batches of a window. There are five micro-batches of one sample on each of two ranks: a whole window and a partial one."""
TRAIN_SET = TensorDataset(torch.ones(10, 1))
TEST_SET = TensorDataset(torch.arange(9.0).reshape(9, 1))


class Weight(nn.Module):
    """One number."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """One weight loses one gradient."""
    return torch.optim.SGD(model.parameters(), lr=1.0)


class Watch:
    """Notes the gradient of each update, by what the weight lost."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.before, self.gradients = module, 0.0, []

    def look(self) -> None:
        """After each micro-batch."""
        now = float(next(self.module.parameters()).detach())
        if now != self.before:
            self.gradients.append(round(self.before - now, 6))
            self.before = now


def tell(library: str, version: str, watch: Watch, evaluated: int) -> None:
    """One line for compare.py, printed by rank 0."""
    print("RESULT " + json.dumps([library, version, watch.gradients, int(evaluated)]), flush=True)
