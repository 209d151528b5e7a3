# ranks 3; expect AR252; says collective mismatch.*rank 2; guilty
import torch, torch.distributed as dist
from job import RANK, mark, start

start()
for step in range(5):
    dist.barrier()
mark()
value = torch.ones(4)
if RANK == 2:
    dist.all_gather([torch.empty(4) for _ in range(3)], value)  #@guilty
else:
    dist.all_reduce(value)
