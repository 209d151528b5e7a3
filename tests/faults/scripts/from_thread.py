# ranks 2; expect AR261; says rank \d.*thread
import threading, time
import torch, torch.distributed as dist
from job import RANK, mark, start, train

def report():
    time.sleep(1.0 + 0.5 * RANK)
    dist.all_reduce(torch.ones(3))

start()
mark()
threading.Thread(target=report, daemon=True).start()
train()
