# ranks 3; expect AR800; says rank 2 .*straggler; guilty; limit 15
import time
from job import RANK, mark, start, train

def fault(step, model):
    if RANK == 2 and step > 12:
        if step == 13: mark()
        time.sleep(0.04)  #@guilty

start()
train(fault)
