# ranks 2; expect AR284; says static_graph=True was promised; guilty
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from job import mark, start

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
    def forward(self, x, both):
        x = self.a(x)
        return self.b(x) if both else x

start()
model = DDP(Net(), static_graph=True)
mark()
for step in range(4):
    model(torch.ones(2, 4), both=step >= 2).sum().backward()  #@guilty
