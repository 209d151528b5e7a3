# ranks 2; expect AR261; says rank \d.*thread; limit 30
import threading, time
import torch, torch.distributed as dist
from job import RANK, mark, start, train

def report():
    for _ in range(20):
        time.sleep(0.013 + 0.02 * RANK)
        dist.all_reduce(torch.ones(3))

def fault(step, model):
    if step == 12:
        mark()
        threading.Thread(target=report, daemon=True, name="report").start()

start()
train(fault)
