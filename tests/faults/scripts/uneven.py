# ranks 3; expect AR251; says rank 2 .*has 10 batches
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset
from job import RANK, mark, network, samples, start

start()
rank, world = dist.get_rank(), dist.get_world_size()
data = samples(100)
share = -(-len(data) // world)
mine = Subset(data, range(rank * share, min(len(data), (rank + 1) * share)))
model = DDP(network())
for x, y in DataLoader(mine, batch_size=3, drop_last=True):
    nn.functional.cross_entropy(model(x), y).backward()
mark()
total = torch.ones(3)
dist.all_reduce(total)
dist.destroy_process_group()
