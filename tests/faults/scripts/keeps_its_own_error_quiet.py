# ranks 2; expect AR250; says rank 0 .*barrier; tells rank 0 is in a try that goes on after an error, which rank 1 may have met with; guilty
from job import RANK, mark, start, train
import torch.distributed as dist


def evaluate(step):
    score = {"val": 0.5}["val" if RANK == 0 or step < 9 else "validation"]
    dist.barrier()  #@guilty
    return score


def fault(step, model):
    if step % 3 == 0:
        try:
            evaluate(step)
        except KeyError:
            mark()


start()
train(fault)
