# ranks 2; expect AR227; says rank 1 .*waits for input; guilty
import os, sys
from job import RANK, mark, start, train

def fault(step, model):
    if RANK == 1 and step == 12:
        sys.stdin = os.fdopen(os.openpty()[1])
        mark()
        input("go on? ")  #@guilty

start()
train(fault)
