# ranks 4; expect AR257; says new_group mismatch; guilty
import torch, torch.distributed as dist
from job import RANK, mark, start

start()
mark()
group = dist.new_group([0, 1] if RANK < 2 else [2, 3])  #@guilty
dist.all_reduce(torch.ones(2), group=group)
dist.barrier()
