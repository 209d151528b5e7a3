# ranks 2; expect AR749; says ranks 0 and 1 .*split the data set differently; limit 40
import os
from torch.utils.data import random_split
from job import RANK, loader, mark, samples, start, torch, train

torch.manual_seed(os.getpid())
kept, held_out = random_split(samples(), [560, 80])
start()
mark()
train(batches=loader(kept), epochs=10, pause_s=0.02)
