# ranks 2; expect AR731; says \b2\.weight on rank 1 differs from rank 0; limit 15
import torch
from job import RANK, mark, start, train

def fault(step, model):
    if RANK == 1 and step == 20:
        mark()
        with torch.no_grad():
            model.module[2].weight.add_(0.01)

start()
train(fault, pause_s=0.01)
