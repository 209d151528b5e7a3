# ranks 2; expect AR205; says rank 1 .*exited with code 3; guilty
import sys
from job import RANK, mark, start, train

def fault(step, model):
    if RANK == 1 and step == 12:
        mark()
        sys.exit(3)  #@guilty

start()
train(fault)
