# ranks 2; expect AR205; says rank 1 .*exited with code 0; guilty
import os
from job import RANK, mark, start, train

def fault(step, model):
    if RANK == 1 and step == 12:
        mark()
        os._exit(0)  #@guilty

start()
train(fault)
