# ranks 2; expect AR207; says rank 1.*loader worker 0 raised KeyError; guilty
import torch
from job import RANK, loader, mark, samples, start, train

class Data(torch.utils.data.Dataset):
    base = samples()
    def __len__(self): return len(self.base)
    def __getitem__(self, i):
        if RANK == 1 and i == 301:
            mark()
            return {}["label"]  #@guilty
        return self.base[i]

if __name__ == "__main__":
    start()
    train(batches=loader(Data(), num_workers=1))
