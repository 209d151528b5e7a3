# ranks 2
"""N03, N05, N13: static_graph with two forwards; a gathered loss; a regulariser that reads a parameter outside forward."""
import os, sys
sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "scripts"))
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from job import network, start

start()
model = DDP(network(), static_graph=True)
for step in range(20):
    loss = model(torch.ones(4, 16)).sum() + model(torch.zeros(4, 16)).sum()
    loss.backward()
plain = DDP(network())
for step in range(20):
    out = plain(torch.ones(4, 16))
    gathered = [torch.empty_like(out) for _ in range(2)]
    dist.all_gather(gathered, out.detach())
    (out.sum() + plain.module[0].weight.square().sum() + sum(g.sum() for g in gathered)).backward()
dist.destroy_process_group()
