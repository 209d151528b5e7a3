# ranks 2; expect AR250; says rank 0 .*barrier; guilty
import torch.distributed as dist
from job import RANK, mark, start, train

def fault(step, model):
    if RANK == 0 and step == 12:
        mark()
        dist.barrier()  #@guilty

start()
train(fault)
