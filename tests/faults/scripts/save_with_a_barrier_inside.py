# ranks 2; expect AR250; says rank 0 .*barrier; guilty
import torch.distributed as dist
from job import RANK, mark, start, train

def save(model):
    model.module.state_dict()
    dist.barrier()  #@guilty

def fault(step, model):
    if step == 12:
        if RANK == 0:
            mark()
            save(model)

start()
train(fault)
