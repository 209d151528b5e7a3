"""A plain DDP script in which all is well, and that does what makes watchers cry: run by healthy.py.

A slow first batch, a loader that stalls now and then, steps of very different lengths, evaluation on all ranks and on rank 0
alone, a checkpoint of rank 0 with the others in a barrier, an all_gather_object of unequal things, a new model half-way, and
ranks that reach the end seconds apart.
"""

import os
import random
import sys
import tempfile
import time
from typing import IO

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

PAUSE_S = float(os.environ.get("HEALTHY_PAUSE_S", "4"))
STEPS = int(os.environ.get("HEALTHY_STEPS", "60"))


class Data(Dataset):
    """The first sample of a process takes long (files are opened, indices built), and some later ones a little."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.is_open = False

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if not self.is_open:
            self.is_open = True
            work(PAUSE_S / 2)
        elif index % 97 == 0:
            time.sleep(0.3)  # a far disk
        return torch.randn(32), index % 4


class SlowFile:
    """A file on a disk that takes its time."""

    def __init__(self, file: IO[bytes], seconds: float) -> None:
        self.file, self.pause_s = file, seconds / 40

    def write(self, data: bytes) -> int:
        time.sleep(self.pause_s)
        return self.file.write(data)

    def flush(self) -> None:
        self.file.flush()


def work(seconds: float) -> None:
    """Keep the processor busy for about so long."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        torch.randn(64, 64).inverse()


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 4))


def evaluate(model: nn.Module, seconds: float) -> float:
    """Look at a validation set for about so long."""
    model.eval()
    right, until = 0, time.monotonic() + seconds
    with torch.no_grad():
        while time.monotonic() < until:
            right += int((model(torch.randn(256, 32)).argmax(1) == 0).sum())
    model.train()
    return right


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)  # DDP gives all ranks the model of rank 0
    pace = random.Random(rank)
    data = Data(STEPS * 4 * world)
    sampler = DistributedSampler(data)
    loader = DataLoader(
        data, batch_size=4, sampler=sampler, num_workers=int(os.environ.get("HEALTHY_WORKERS", "1"))
    )
    for _ in range(2):
        model = DistributedDataParallel(network())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for epoch in range(2):
            sampler.set_epoch(epoch)
            for step, (x, y) in enumerate(loader):
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
                time.sleep(pace.choice((0, 0, 0.001, 0.02, 0.2 if step % 20 == 7 else 0)))
                if step % 25 == 24:
                    counts: list = [None] * world
                    dist.all_gather_object(counts, list(range(rank + 1)))
            evaluate(model.module, PAUSE_S)  # all ranks together
            if rank == 0:
                evaluate(model.module, PAUSE_S / 2)
                with tempfile.TemporaryFile() as file:
                    torch.save(model.state_dict(), SlowFile(file, PAUSE_S / 2))  # type: ignore[arg-type]
            dist.barrier()
    dist.destroy_process_group()
    time.sleep(rank * 0.3)
    if rank == 0:
        print("healthy", file=sys.stderr)


if __name__ == "__main__":
    main()
