# ranks 2; expect AR231; says rank 0 .*works alone; guilty; limit 12
import time
import torch.distributed as dist
from job import RANK, mark, start, train

start()
if RANK == 0:
    mark()
    time.sleep(100)  #@guilty
dist.barrier()
train()
