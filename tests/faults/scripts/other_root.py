# ranks 2; expect AR255; says root mismatch.*rank 1
import torch, torch.distributed as dist
from job import RANK, mark, start

start()
value = torch.ones(4)
mark()
dist.broadcast(value, src=RANK)
dist.barrier()
