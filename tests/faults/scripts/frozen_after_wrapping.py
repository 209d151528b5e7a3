# ranks 2; expect AR281; says 0\.bias, 0\.weight; guilty
"""C64: parameters are frozen after DDP has been built."""
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from job import mark, network, start

start()
model = DDP(network())
for parameter in model.module[0].parameters():
    parameter.requires_grad_(False)  #@guilty
mark()
for step in range(3):
    model(torch.randn(8, 16)).sum().backward()
