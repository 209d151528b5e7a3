# ranks 2; expect AR257 AR250; says rank [01]; guilty
import torch, torch.distributed as dist
from job import RANK, mark, start

start()
mark()
if RANK == 0:
    dist.new_group([0])  #@guilty
dist.all_reduce(torch.ones(2))
dist.barrier()
