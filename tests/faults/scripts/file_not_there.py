# ranks 2; expect AR210; says rank 1 .*used .*before; guilty
import os, tempfile, time, torch
from job import RANK, mark, start
import torch.distributed as dist

start()
folder = os.path.join(os.environ.get("FAULT_DIR", tempfile.gettempdir()), "step-1")
dist.barrier()
mark()
if RANK == 0:
    time.sleep(0.5)
    os.makedirs(folder)
torch.save({}, os.path.join(folder, f"shard-{RANK}.pt"))  #@guilty
dist.barrier()
