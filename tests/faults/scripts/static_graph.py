# ranks 2; expect AR284 AR281; says static_graph|unused
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from job import mark, start

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
    def forward(self, x):
        return self.a(x), self.b(x)

start()
model = DDP(Net(), static_graph=True)
mark()
for step in range(4):
    one, two = model(torch.ones(2, 4))
    one.sum().backward()
