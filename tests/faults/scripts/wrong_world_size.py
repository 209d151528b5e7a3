# ranks 2; expect AR302; says world size; limit 15
import torch.distributed as dist
from job import RANK, mark

mark()
dist.init_process_group("gloo", rank=RANK, world_size=2 + 2 * RANK)
