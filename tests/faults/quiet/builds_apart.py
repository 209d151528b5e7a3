# ranks 2
"""DDP without its first exchange: rank 0 is in a barrier while rank 1 still constructs its own."""
import os, sys, time
sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "scripts"))
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from job import RANK, network, start, train

start()
if RANK == 0:
    import torch._dynamo  # what the construction takes its time for
dist.barrier()
model = DDP(network(), init_sync=False)
dist.barrier()
time.sleep(0.5)
dist.destroy_process_group()
