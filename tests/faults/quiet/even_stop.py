# ranks 3
"""N09: the flag is agreed on before leaving the loop."""
import os, sys
sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "scripts"))
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from job import RANK, loader, network, start

start()
model = DDP(network())
for step, (x, y) in enumerate(loader()):
    nn.functional.cross_entropy(model(x), y).backward()
    stop = torch.tensor(int(RANK == 1 and step == 7))
    dist.all_reduce(stop, op=dist.ReduceOp.MAX)
    if stop: break
dist.destroy_process_group()
