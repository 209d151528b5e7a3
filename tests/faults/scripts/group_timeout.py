# ranks 2; expect AR266; says rank 0 .*(timeout|did not come); limit 20
import time
from datetime import timedelta
import torch, torch.distributed as dist
from job import RANK, mark

torch.set_num_threads(1)
dist.init_process_group("gloo", timeout=timedelta(seconds=2))
dist.barrier()
mark()
if RANK == 0:
    a, until = torch.randn(200, 200), time.time() + 30   # long work, here and there
    while time.time() < until:
        a = torch.tanh(a @ a)
        a = a + 1
dist.all_reduce(torch.ones(3))
