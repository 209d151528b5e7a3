# ranks 2; expect AR224; says rank 1 .*computes; guilty
from job import RANK, mark, start, train

def fault(step, model):
    if RANK == 1 and step == 12:
        mark()
        while True: pass  #@guilty

start()
train(fault)
