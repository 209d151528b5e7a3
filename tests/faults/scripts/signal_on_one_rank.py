# ranks 2; expect AR265 AR206; says rank 0 .*(left its loop|finished)
import os, signal
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from job import RANK, loader, mark, network, start

start()
stop = False
def handler(number, frame):
    global stop
    stop = True
signal.signal(signal.SIGTERM, handler)
model = DDP(network())
for step, (x, y) in enumerate(loader()):
    if stop: break
    nn.functional.cross_entropy(model(x), y).backward()
    if RANK == 0 and step == 10:
        mark()
        os.kill(os.getpid(), signal.SIGTERM)
