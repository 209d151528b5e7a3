# ranks 2; expect AR232; says waits? for a lock file that a dead process left behind: .*lock; limit 25
import os, tempfile
os.environ["TORCH_EXTENSIONS_DIR"] = os.environ.get("FAULT_DIR", "/tmp/fault-ext")
from job import mark, start
import torch.distributed as dist
from torch.utils.file_baton import FileBaton

start()
folder = os.path.join(os.environ["TORCH_EXTENSIONS_DIR"], "mine")
os.makedirs(folder, exist_ok=True)
lock = os.path.join(folder, "lock")
open(lock, "a").close()
dist.barrier()
mark()
FileBaton(lock).wait()
