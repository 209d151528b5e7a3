# ranks 2; expect AR308; says rank 1 .*another version of torch.*2\.12\.1; limit 20
"""Rank 1 goes by the name of another version, and reads under it what the ranks send each other at the start: they never meet."""

import torch
import torch.distributed as dist
from job import RANK, mark

if RANK == 1:
    torch.__version__ = "2.12.1+cpu"
store, rank, world_size = next(dist.rendezvous("env://"))
mark()
own = dist.PrefixStore(f"torch-{torch.__version__}", store)
dist.init_process_group("gloo", store=own, rank=rank, world_size=world_size)
