# ranks 2; expect AR234; says rank 1 .*waits for .*(process|program); tells is a child of it: sleep 300; guilty
import subprocess
from job import RANK, mark, start, train

def fault(step, model):
    if RANK == 1 and step == 12:
        mark()
        subprocess.run(["sleep", "300"])  #@guilty

start()
train(fault)
