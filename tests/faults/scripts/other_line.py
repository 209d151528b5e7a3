# ranks 2; expect AR258; says out of order; guilty
import time
import torch, torch.distributed as dist
from job import RANK, mark, start

start()
loss, correct = torch.ones(1), torch.zeros(1)
mark()
if RANK == 0:
    dist.all_reduce(loss)
    dist.all_reduce(correct)
else:
    dist.all_reduce(correct)  #@guilty
    dist.all_reduce(loss)
time.sleep(2)
dist.barrier()
