# ranks 2; expect AR307; says rank 1 .*cannot reach the store; guilty; limit 20
import os, socket
from datetime import timedelta
import torch.distributed as dist
from job import RANK, mark

if RANK == 1:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ["MASTER_PORT"] = str(free.getsockname()[1])   # nobody listens there
    mark()
dist.init_process_group("gloo", timeout=timedelta(seconds=6))  #@guilty
