# ranks 2
"""All ranks are slow together: a first batch, an evaluation, a checkpoint."""
import os, sys, time
sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "scripts"))
import torch, torch.distributed as dist
from job import RANK, start, train

def together(step, model):
    if step in (1, 10):
        time.sleep(3)
    if step == 15:
        model.eval()
        with torch.no_grad():
            for _ in range(30):
                model.module(torch.zeros(8, 16))
                time.sleep(0.05)
        model.train()

start()
train(together, epochs=1)
dist.destroy_process_group()
