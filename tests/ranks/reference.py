"""What would one device have computed? Plain torch in one process, for comparison; knows nothing of allranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

# Sums in another order: each of the few hundred products may round once, relative to the largest intermediate.
TOLERANCE = 1e-11


def points(num: int = 45, seed: int = 3) -> TensorDataset:
    """float64 regression data, (num, 6) -> (num, 2)."""
    g = torch.Generator().manual_seed(seed)
    return TensorDataset(
        torch.randn(num, 6, generator=g, dtype=torch.float64),
        torch.randn(num, 2, generator=g, dtype=torch.float64),
    )


def net(seed: int = 0) -> nn.Module:
    """A small float64 network, the same for the same seed."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def order_of(num: int, seed: int, epoch: int) -> list[int]:
    """The order in which a run of one rank sees the samples, asked of the data layer itself."""
    from allranks.data import make_loader

    loader = make_loader(TensorDataset(torch.arange(num)), global_batch_size=num, seed=seed, shuffle=True)
    loader.set_epoch(epoch)
    return next(iter(loader))[0].tolist()


def train_on_one(
    data: TensorDataset,
    *,
    batch: int,
    epochs: int,
    lr: float = 0.1,
    seed: int = 0,
    model: nn.Module | None = None,
    loss_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = F.mse_loss,
    after: Callable[[nn.Module], None] | None = None,
) -> list[torch.Tensor]:
    """Parameters after `epochs` of SGD with momentum over whole global batches: the definition of the right result."""
    model = model if model is not None else net()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    for epoch in range(epochs):
        order = order_of(len(data), seed, epoch)
        for first in range(0, len(order), batch):
            x, y = data[order[first : first + batch]]
            optimizer.zero_grad()
            loss_of(model(x), y).backward()
            optimizer.step()
            if after is not None:
                after(model)
    return [p.detach() for p in model.parameters()]


def assert_close(
    mine: Sequence[torch.Tensor], right: Sequence[torch.Tensor], tolerance: float = TOLERANCE
) -> None:
    """Equal but for the order of sums."""
    assert len(mine) == len(right)
    for a, b in zip(mine, right, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
