# ranks 2; expect AR306; says port \d+ is taken by process
import os, socket
from job import RANK, mark
import torch.distributed as dist

if RANK == 0:
    taken = socket.create_server(("", 0))
    os.environ["MASTER_PORT"] = str(taken.getsockname()[1])
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    mark()
    dist.init_process_group("gloo")
else:
    import time
    time.sleep(30)
