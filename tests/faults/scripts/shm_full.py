# ranks 2; expect AR208; says rank [01].*shared memory .*full; needs small shm; limit 30
import torch
from job import loader, mark, start, train

class Data(torch.utils.data.Dataset):
    def __len__(self): return 640
    def __getitem__(self, i): return torch.randn(100_000), i % 4   # 8 of them: 3.2 MB

class Net(torch.nn.Linear):
    def __init__(self): super().__init__(100_000, 4)

if __name__ == "__main__":
    start()
    mark()
    train(model=Net(), batches=loader(Data(), num_workers=2))
