# ranks 2; expect AR228; says rank 1 .*loader worker 0 is stuck at index 301; guilty; limit 20
"""As loader_stuck, with workers started by spawn."""
import time, torch
from job import RANK, loader, mark, samples, start, train

class Data(torch.utils.data.Dataset):
    def __init__(self): self.base = samples()
    def __len__(self): return len(self.base)
    def __getitem__(self, i):
        if i == 301 and RANK == 1:
            mark()
            while True: time.sleep(0.01)  #@guilty
        return self.base[i]

if __name__ == "__main__":
    start()
    train(batches=loader(Data(), num_workers=1, multiprocessing_context="spawn"))
