# ranks 2
"""Averages whose names match or are made to, a dictionary filled as it goes, anchors, statistics by wrapped names; the twin of scripts/names_unmatched.py."""
import os, sys, time
sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "scripts"))
from job import DDP, dist, loader, network, nn, start, torch

start()
model = network()
anchors = {name: p.detach().clone() for name, p in model.named_parameters()}
bare = {name: p.detach().clone() for name, p in model.named_parameters()}
model = DDP(model)
wrapped = {name: p.detach().clone() for name, p in model.named_parameters()}
filled, norms = {}, {}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    for x, y in loader():
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        for name, p in model.named_parameters():
            name = name.removeprefix("module.")
            if name in anchors:
                loss = loss + 0.01 * (p - anchors[name]).square().sum()
        loss.backward()
        optimizer.step()
        for name, p in model.named_parameters():
            if name in wrapped:
                wrapped[name].lerp_(p.detach(), 0.01)
            if name in filled:
                filled[name].lerp_(p.detach(), 0.01)
            else:
                filled[name] = p.detach().clone()
            norms[name] = norms.get(name, 0.0) + p.grad.norm().item()
        for name, p in model.module.named_parameters():
            if name in bare:
                bare[name].lerp_(p.detach(), 0.01)
        time.sleep(0.01)
dist.destroy_process_group()
