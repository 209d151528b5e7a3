# ranks 2
"""Rank 0 writes for a while; the others wait in the barrier that belongs to it."""
import os, sys, tempfile, time
sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "scripts"))
import torch, torch.distributed as dist
from job import RANK, start, train

class Slow:
    def __init__(self, file): self.file = file
    def write(self, data):
        time.sleep(0.05)
        return self.file.write(data)
    def flush(self): self.file.flush()

def save(step, model):
    if step % 15 == 0:
        if RANK == 0:
            with tempfile.TemporaryFile() as file:
                torch.save({str(i): torch.zeros(10) for i in range(20)}, Slow(file))
        dist.barrier()

start()
train(save, epochs=1)
dist.destroy_process_group()
