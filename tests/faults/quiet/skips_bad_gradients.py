# ranks 2
"""Gradients that are not finite, as a scaler of losses makes them, and steps that are left out on all ranks because of them."""
import os, sys, time
sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "scripts"))
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from job import RANK, loader, network, start

start()
model = DDP(network())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(2):
    for step, (x, y) in enumerate(loader()):
        optimizer.zero_grad()
        out = model(x)
        loss = nn.functional.cross_entropy(out, y)
        if RANK == 1 and step % 10 == 5:
            loss = loss + (out * 0).square().sum().sqrt()
        loss.backward()
        if torch.isfinite(nn.utils.clip_grad_norm_(model.parameters(), 1.0)):
            optimizer.step()
        time.sleep(0.01)
dist.destroy_process_group()
