# ranks 2; expect AR236; says rank 1 .*does not come; guilty; limit 8
import signal
from job import RANK, mark, start, train

def fault(step, model):
    if RANK == 1 and step == 12:
        mark()
        signal.pause()  #@guilty

start()
train(fault)
