# ranks 2
"""N11: a head that one rank does not use, with find_unused_parameters."""
import os, sys
sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "scripts"))
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from job import RANK, start

class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.h1, self.h2 = nn.Linear(4, 4), nn.Linear(4, 4)
    def forward(self, x, both):
        return self.h1(x) + (self.h2(x) if both else 0)

start()
model = DDP(Heads(), find_unused_parameters=True)
for step in range(60):
    model(torch.ones(2, 4), RANK == 0 or step % 2 == 0).sum().backward()
dist.destroy_process_group()
