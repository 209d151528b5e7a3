# ranks 2; expect AR228; says rank 1 .*data loader; guilty
import time, torch
from job import RANK, mark, samples, start, train

class Data(torch.utils.data.Dataset):
    base = samples()
    def __len__(self): return len(self.base)
    def __getitem__(self, i):
        if i == 300 and RANK == 1:
            mark()
            time.sleep(1000)  #@guilty
        return self.base[i]

start()
train(batches=torch.utils.data.DataLoader(Data(), batch_size=8))
