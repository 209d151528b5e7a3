# ranks 2; expect AR253; says shape mismatch.*\[5\].*\[3\]; guilty
import torch, torch.distributed as dist
from job import RANK, mark, start

start()
mine = torch.ones(5 if RANK == 0 else 3)
mark()
dist.all_gather([torch.empty_like(mine) for _ in range(2)], mine)  #@guilty
dist.barrier()
