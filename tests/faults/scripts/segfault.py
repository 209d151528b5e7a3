# ranks 2; expect AR204; says rank 1 .*segmentation fault; guilty
import ctypes
from job import RANK, mark, start, train

def fault(step, model):
    if RANK == 1 and step == 12:
        mark()
        ctypes.string_at(0)  #@guilty

start()
train(fault)
