# ranks 2; expect AR203; says rank 1 .*aborted.*SIGABRT; guilty
import ctypes, os
from job import RANK, mark, start, train

def fault(step, model):
    if RANK == 1 and step == 12:
        mark()
        ctypes.CDLL(None).abort()  #@guilty

start()
train(fault)
