# ranks 2; expect AR283; says ready|gradient twice; guilty
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint
from job import mark, start

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
    def forward(self, x):
        return self.b(checkpoint(self.a, x, use_reentrant=True))

start()
model = DDP(Net(), find_unused_parameters=True)
mark()
model(torch.ones(2, 4, requires_grad=True)).sum().backward()  #@guilty
