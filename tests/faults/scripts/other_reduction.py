# ranks 2; expect AR256; says reduce operation mismatch.*rank 1
import time
import torch, torch.distributed as dist
from job import RANK, mark, start

start()
value = torch.ones(4)
mark()
dist.all_reduce(value, op=dist.ReduceOp.SUM if RANK == 0 else dist.ReduceOp.MAX)
time.sleep(2)
dist.barrier()
