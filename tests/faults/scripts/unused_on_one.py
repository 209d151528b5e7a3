# ranks 2; expect AR281; says rank 1.*h2.bias, h2.weight
import torch
from torch import nn
from job import RANK, mark, start, train

class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.h1, self.h2, self.steps = nn.Linear(16, 4), nn.Linear(16, 4), 0
    def forward(self, x):
        self.steps += 1
        if RANK == 1 and self.steps == 12:
            mark()
        return self.h1(x) + (0 if RANK == 1 and self.steps >= 12 else self.h2(x))

start()
train(model=Heads())
