# ranks 2; expect AR250 AR252 AR264; says mismatch.*rank 1|rank 0 .*mismatch|mismatch.*rank 0; guilty
import torch, torch.distributed as dist
from torch import nn
from job import RANK, mark, start, train

class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.line, self.steps = nn.Linear(16, 4), 0
    def forward(self, x):
        self.steps += 1
        if not (RANK == 1 and self.steps == 12):
            mean = x.mean(0).detach()
            dist.all_reduce(mean)  #@guilty
        else:
            mark()
        return self.line(x)

start()
train(model=Shared())
