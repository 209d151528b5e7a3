# ranks 2; expect AR265 AR251 AR206 AR262; says rank 1
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from job import RANK, loader, mark, network, start

start()
model = DDP(network())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step, (x, y) in enumerate(loader()):
    if RANK == 1 and step == 12:
        continue
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
if RANK == 1:
    mark()
dist.destroy_process_group()
