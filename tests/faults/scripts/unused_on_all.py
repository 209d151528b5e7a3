# ranks 2; expect AR281; says unused parameters on all ranks: 0.bias, 0.weight
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from job import RANK, mark, network, start

start()
model = DDP(network())
model.module[0].requires_grad_(False)
mark()
for step in range(3):
    model(torch.ones(2, 16)).sum().backward()
