# ranks 2; expect AR226; says rank 1 .*sleeps; guilty; module
"""Started with -m."""
import time
from job import RANK, mark, start, train

def fault(step, model):
    if RANK == 1 and step == 12:
        mark()
        time.sleep(300)  #@guilty

start()
train(fault)
