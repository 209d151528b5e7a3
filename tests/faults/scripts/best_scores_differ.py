# ranks 3; expect AR250 AR252; says mismatch; tells rank 0: val_loss = 0.25, kept = 0.\d; guilty
"""C11: each rank decides by its own score which checkpoints to remove, with a broadcast for each."""
import torch, torch.distributed as dist
from job import RANK, mark, start, train

def remove_old(val_loss):
    for kept in (0.5, 0.4, 0.3):
        if val_loss < kept:
            dist.broadcast(torch.zeros(2), src=0)  #@guilty

def fault(step, model):
    if step == 12:
        mark()
        remove_old(val_loss=(0.25, 0.45, 0.35)[RANK])

start()
train(fault)
