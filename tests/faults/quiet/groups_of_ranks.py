# ranks 4
"""Groups made by all, used by their members, with different calls in each."""
import os, sys, time
sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "scripts"))
import torch, torch.distributed as dist
from job import RANK, start

start()
groups = [dist.new_group(m) for m in ([0, 1], [2, 3])]
mine = groups[RANK // 2]
for step in range(40):
    if RANK < 2:
        dist.all_reduce(torch.ones(2), group=mine)
    else:
        dist.all_gather([torch.empty(3), torch.empty(3)], torch.ones(3), group=mine)
    if RANK == 3: time.sleep(0.02)
    if RANK == 0: dist.send(torch.ones(1), 1)
    if RANK == 1: dist.recv(torch.empty(1), 0)
dist.barrier()
dist.destroy_process_group()
