# ranks 3; expect AR201; says rank 2 .*killed by SIGKILL
import os, signal
from job import RANK, mark, start, train

def fault(step, model):
    if RANK == 2 and step == 12:
        mark()
        os.kill(os.getpid(), signal.SIGKILL)

start()
train(fault)
