# ranks 2
"""Micro-batches of unequal size that are weighed by count; the twin of scripts/mean_of_means.py."""
import os, sys, time
sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "scripts"))
from job import DDP, RANK, dist, network, nn, samples, start, torch

start()
model = DDP(network())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = samples(480).tensors
for step in range(60):
    chunks = torch.randperm(480, generator=torch.Generator().manual_seed(step)).split([2, 30, 5, 11] * 10)
    own = [chunks[2 * RANK + k] for k in range(2)]
    count = torch.tensor(sum(map(len, own)))
    dist.all_reduce(count)
    optimizer.zero_grad()
    for some in own:
        total = nn.functional.cross_entropy(model(x[some]), y[some], reduction="sum")
        (total * dist.get_world_size() / count).backward()
    optimizer.step()
    time.sleep(0.02)
dist.destroy_process_group()
