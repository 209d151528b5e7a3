# ranks 2; expect AR230; says rank 0 .*writing a file; guilty; limit 40
import os, tempfile, torch
from job import RANK, mark, start, train

def fault(step, model):
    if RANK == 0 and step == 12:
        path = os.path.join(tempfile.mkdtemp(), "pipe")
        os.mkfifo(path)
        reader = os.open(path, os.O_RDWR)   # nobody reads: the disk is full
        mark()
        with open(path, "wb") as file:
            file.write(bytes(1 << 22))  #@guilty

start()
train(fault)
