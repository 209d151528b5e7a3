# ranks 3
"""Evaluation with a padding sampler whose results are gathered and trimmed."""
import os, sys, time
sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "scripts"))
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from job import loader, network, samples, start

start()
model = DDP(network())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = samples(10)
held_out = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, shuffle=False))
for epoch in range(2):
    for x, y in loader():
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        time.sleep(0.01)
    with torch.no_grad():
        out = torch.cat([model(x) for x, y in held_out])
    gathered = [torch.empty_like(out) for _ in range(3)]
    dist.all_gather(gathered, out)
    torch.stack(gathered, 1).reshape(-1, 4)[:10]
dist.destroy_process_group()
