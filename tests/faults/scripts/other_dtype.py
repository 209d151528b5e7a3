# ranks 2; expect AR254; says dtype mismatch.*float32.*int32
import time
import torch, torch.distributed as dist
from job import RANK, mark, start

start()
value = torch.ones(4, dtype=torch.float32 if RANK == 0 else torch.int32)
mark()
dist.all_reduce(value)
time.sleep(1)
dist.barrier()
