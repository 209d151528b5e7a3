# ranks 2; expect AR306; says port \d+ is taken by process
import os, socket, time
from job import RANK, mark
import torch.distributed as dist

# Rank 1 stands for the other program: it holds the port until the job is over.
number = os.environ.get("FAULT_MARK", f"/tmp/{os.environ['MASTER_PORT']}") + ".port"
if RANK == 0:
    while not os.path.exists(number):
        time.sleep(0.01)
    os.environ["MASTER_PORT"] = open(number).read()
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    mark()
    dist.init_process_group("gloo")
else:
    taken = socket.create_server(("", 0))
    with open(number + ".new", "w") as file:
        file.write(str(taken.getsockname()[1]))
    os.rename(number + ".new", number)
    time.sleep(30)
