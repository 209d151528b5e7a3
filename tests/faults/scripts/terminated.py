# ranks 2; expect AR201; says rank 1 .*SIGTERM
import os, signal
from job import RANK, mark, start, train

def fault(step, model):
    if RANK == 1 and step == 12:
        mark()
        os.kill(os.getpid(), signal.SIGTERM)

start()
train(fault)
