# ranks 2; expect AR262 AR206 AR250; says rank 1 .*(destroyed|finished|barrier)
import time
import torch.distributed as dist
from job import RANK, mark, start

start()
dist.barrier()
mark()
if RANK == 1:
    dist.destroy_process_group()
    time.sleep(60)
else:
    dist.barrier()
