# ranks 2; expect AR200 AR307; says 66660; guilty
"""C107: MASTER_PORT above 65535."""
import os
import torch.distributed as dist
from job import mark

os.environ["MASTER_PORT"] = "66660"
mark()
dist.init_process_group("gloo")  #@guilty
