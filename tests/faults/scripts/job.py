"""What the fault scripts share: a small DDP job over gloo, as users write it."""

import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

RANK = int(os.environ.get("RANK", 0))


def start():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    return dist.get_rank()


def samples(count=640):
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(count, 16, generator=generator), torch.arange(count) % 4)


def loader(dataset=None, **options):
    dataset = dataset or samples()
    return DataLoader(dataset, batch_size=8, sampler=DistributedSampler(dataset, shuffle=False), **options)


def network():
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))


def train(at_step=None, epochs=50, model=None, batches=None, pause_s=0.005):
    """Train; `at_step(step, model)` is called after each step."""
    model = DDP(model or network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = batches or loader()
    step = 0
    for epoch in range(epochs):
        for x, y in batches:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            step += 1
            time.sleep(pause_s)
            if at_step is not None:
                at_step(step, model)
    return step


def mark():
    """The fault strikes now: for the harness."""
    if path := os.environ.get("FAULT_MARK"):
        with open(path, "a") as file:
            file.write(f"{time.time()}\n")
