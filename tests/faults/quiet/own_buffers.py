# ranks 2
"""Buffers that are each rank's own by design: batch norm's, counters, caches that are not saved, a codebook updated from all ranks."""
import os, sys, time
sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "scripts"))
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from job import RANK, loader, network, start

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.body = nn.BatchNorm1d(16), network()
        self.register_buffer("seen", torch.zeros(1))
        self.register_buffer("cache", torch.zeros(16), persistent=False)
        self.register_buffer("codebook", torch.zeros(16))

    def forward(self, x):
        self.seen += len(x) + RANK
        self.cache.copy_(x[0])
        mean = x.mean(0)
        dist.all_reduce(mean)
        self.codebook.mul_(0.9).add_(mean, alpha=0.05)
        return self.body(self.norm(x - self.codebook))

start()
model = DDP(Net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(2):
    for x, y in loader():
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        time.sleep(0.01)
dist.destroy_process_group()
