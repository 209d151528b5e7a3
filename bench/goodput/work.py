"""The work of both jobs: a small network, about 1 MB, on random data; and how they say where they stand."""

import os

import torch
from torch import nn

EPOCHS = 10_000


def data() -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6400, 64, generator=generator)
    return torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 2))


class Progress:
    """The number of updates, in a file of one length: a reader never meets an empty one."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT)

    def say(self, updates: int) -> None:
        os.pwrite(self._fd, f"{updates:12d}".encode(), 0)
