# ranks 2; expect AR265 AR206; says rank 1 .*(left its loop|finished)
import torch.distributed as dist
from torch import nn
import torch
from torch.nn.parallel import DistributedDataParallel as DDP
from job import RANK, loader, mark, network, start

start()
model = DDP(network())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step, (x, y) in enumerate(loader()):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    if RANK == 1 and step == 12:
        mark()
        break
dist.destroy_process_group()
