# ranks 2; expect AR252 AR250; says mismatch; guilty
import torch, torch.distributed as dist
from job import RANK, mark, start, train

def compute(step, model):
    if step != 12:
        return
    states = [torch.ones(3), torch.ones(2)] if RANK == 0 else []
    mark()
    for state in states:
        dist.all_gather([torch.empty_like(state) for _ in range(2)], state)  #@guilty

start()
train(compute)
