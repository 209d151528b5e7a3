"""Rank 1 never comes to its fourth backward. Plain DDP, or allranks.start() if given its timeout."""

import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def train(model, rank):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1000):
        if rank == 1 and step == 3:
            print("hangs", flush=True)
            time.sleep(600)
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


if len(sys.argv) > 1:
    import allranks

    with allranks.start("run", timeout_s=float(sys.argv[1])) as run:
        train(run.model(nn.Linear(4, 4)), run.rank)
else:
    dist.init_process_group("gloo")
    train(DistributedDataParallel(nn.Linear(4, 4)), dist.get_rank())
