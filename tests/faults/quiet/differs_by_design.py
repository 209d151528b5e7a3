# ranks 2
"""Ranks differ by design: a parameter DDP leaves alone, a buffer, one more optimizer on rank 0, a nan loss that is left out."""
import os, sys, time
sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "scripts"))
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from job import RANK, network, start

start()

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.side = network(), nn.Linear(2, 2)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x):
        self.seen += RANK  # DDP gives rank 0's to all before each forward
        return self.body(x)

net = Net()
nn.init.constant_(net.side.weight, RANK)
DDP._set_params_and_buffers_to_ignore_for_model(net, ["side.weight", "side.bias"])
model = DDP(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
aside = nn.Linear(4, 1)
asides = torch.optim.SGD(aside.parameters(), lr=0.01)
for step in range(200):
    loss = model(torch.full((2, 16), 1.0 + RANK)).square().mean()
    if RANK == 1 and step % 50 == 7:
        wrong = loss * float("nan")
        if torch.isfinite(wrong):
            wrong.backward()
    optimizer.zero_grad()
    loss.backward()
    if RANK == 0 and step % 3 == 0:  # before the model's own step: as many steps have ended as on rank 1, of other things
        asides.zero_grad()
        aside(torch.ones(2, 4)).sum().backward()
        asides.step()
    optimizer.step()
    with torch.no_grad():
        for parameter in net.body.parameters():
            parameter.clamp_(-1, 1)
    time.sleep(0.01)
dist.destroy_process_group()
