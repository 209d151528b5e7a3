# ranks 2
"""Local steps: every backward is under no_sync, and the script averages the parameters itself now and then."""
import os, sys, time
sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "scripts"))
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from job import RANK, network, start

start()
model = DDP(network())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(200):
    optimizer.zero_grad()
    with model.no_sync():
        model(torch.full((2, 16), 1.0 + RANK)).square().mean().backward()
    optimizer.step()
    if step % 20 == 19:
        with torch.no_grad():
            for parameter in model.parameters():
                dist.all_reduce(parameter)
                parameter /= dist.get_world_size()
    time.sleep(0.01)
dist.destroy_process_group()
