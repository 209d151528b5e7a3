# ranks 3; expect AR221; says rank 2 .*stopped; guilty
import os, signal
from job import RANK, mark, start, train

def fault(step, model):
    if RANK == 2 and step == 12:
        mark()
        os.kill(os.getpid(), signal.SIGSTOP)  #@guilty

start()
train(fault)
