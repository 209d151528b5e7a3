# ranks 2; expect AR283; says gradient twice; guilty
"""C47: one forward through both heads, one through one, one backward of the sum."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from job import mark, start


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk, self.h1, self.h2 = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, both):
        x = self.trunk(x)
        return self.h1(x) + self.h2(x) if both else self.h1(x)


start()
model = DDP(Heads(), find_unused_parameters=True)
mark()
first = model(torch.ones(2, 4), both=True)
second = model(torch.ones(2, 4), both=False)
(first + second).sum().backward()  #@guilty
