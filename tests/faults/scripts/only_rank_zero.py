# ranks 1; expect AR300; says rank 1 .*missing; guilty; limit 15
"""C100: two ranks are promised, one is started."""
import torch.distributed as dist
from job import mark

mark()
dist.init_process_group("gloo", rank=0, world_size=2)  #@guilty
