# ranks 2; expect AR220; says rank 1 .*breakpoint; guilty
from job import RANK, mark, start, train

def fault(step, model):
    if RANK == 1 and step == 12:
        mark()
        breakpoint()  #@guilty
        print("after")  #@guilty

start()
train(fault)
