# ranks 3; expect AR200; says rank 1 .*ValueError: no valid sample; guilty
import time
import torch.distributed as dist
from job import RANK, mark, start, train

def fault(step, model):
    if RANK == 1 and step == 12:
        try:
            mark()
            raise ValueError("no valid sample")  #@guilty
        finally:
            dist.destroy_process_group()   # the others hear of it before anybody sees the error
            time.sleep(0.6)

start()
train(fault)
