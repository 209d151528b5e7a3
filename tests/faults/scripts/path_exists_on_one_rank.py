# ranks 2; expect AR252; says mismatch.*rank 0 is in broadcast_object_list.*rank 1 is in all_reduce; guilty
import torch, torch.distributed as dist
from job import RANK, mark, start

start()
dist.barrier()
mark()
if RANK == 0:
    dist.broadcast_object_list([{"step": 1}], src=0)  #@guilty
dist.all_reduce(torch.ones(1))
dist.barrier()
