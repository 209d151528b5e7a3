# ranks 2; expect AR225; says rank 1 .*GIL; guilty; limit 12
import re
from job import RANK, mark, start, train

def fault(step, model):
    if RANK == 1 and step == 12:
        mark()
        re.match(r"(a+)+$", "a" * 60 + "b")  #@guilty

start()
train(fault)
