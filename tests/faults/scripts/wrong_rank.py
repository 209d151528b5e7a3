# ranks 2; expect AR302; says rank 0 is there twice; limit 15
import torch.distributed as dist
from job import mark

mark()
dist.init_process_group("gloo", rank=0, world_size=2)
