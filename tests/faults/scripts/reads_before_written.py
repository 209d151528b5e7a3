# ranks 2; expect AR210; says rank 1 .*used .*best\.pt before; guilty
"""C61: rank 0 writes the best model, and all read it at once."""
import os, time, torch, torch.distributed as dist
from job import RANK, mark, start

start()
path = os.path.join(os.environ.get("FAULT_DIR", "."), "best.pt")
dist.barrier()
mark()
if RANK == 0:
    time.sleep(0.5)
    torch.save({}, path)
torch.load(path)  #@guilty
dist.barrier()
