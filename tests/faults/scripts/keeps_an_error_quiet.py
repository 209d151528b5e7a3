# ranks 2; expect AR251; says rank 1 .*39; tells went on after a ValueError in the next batch, step 31 .sample 61 is broken.; guilty
from job import DDP, RANK, Dataset, loader, mark, network, nn, samples, start, torch


class Samples(Dataset):
    """One of them cannot be read on rank 1."""

    def __init__(self):
        self.whole = samples()

    def __len__(self):
        return len(self.whole)

    def __getitem__(self, index):
        if RANK == 1 and index == 481:
            mark()
            raise ValueError("sample 61 is broken")
        return self.whole[index]


start()
model = DDP(network())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(3):
    batches = iter(loader(Samples()))
    while True:
        try:
            x, y = next(batches)
        except StopIteration:
            break
        except ValueError:  #@guilty
            continue
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
