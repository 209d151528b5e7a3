# ranks 2; expect AR286; says rank 0 .*all_gather_object; limit 30
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from job import RANK, mark, network, start, train

start()
mark()
if RANK == 0:
    dist.all_gather_object([None, None], {"a": 1})
model = DDP(network())
