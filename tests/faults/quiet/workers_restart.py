# ranks 2
"""Loader workers are started anew in each epoch, by spawn."""
import os, sys
sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "scripts"))
import torch.distributed as dist
from job import loader, samples, start, train

if __name__ == "__main__":
    start()
    train(epochs=2, batches=loader(samples(160), num_workers=1, multiprocessing_context="spawn"))
    dist.destroy_process_group()
