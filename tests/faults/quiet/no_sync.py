# ranks 2
"""N01: accumulation under no_sync, ranks with different micro-batches in between."""
import os, sys, time
sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "scripts"))
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from job import RANK, network, start

start()
model = DDP(network())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(30):
    with model.no_sync():
        for _ in range(1 + RANK):
            model(torch.ones(2, 16)).square().mean().backward()
    model(torch.ones(2, 16)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
