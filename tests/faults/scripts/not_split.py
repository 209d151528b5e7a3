# ranks 2; expect AR743; says ranks 0 and 1 .*Numbers comes 4 times.*workers 0, 1; guilty; limit 40
from torch.utils.data import DataLoader, IterableDataset
from job import DDP, mark, network, nn, start, time, torch

class Numbers(IterableDataset):
    def __iter__(self):  #@guilty
        for i in range(60):
            yield torch.full((16,), float(i)), i % 4

start()
model = DDP(network())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
mark()
for epoch in range(4):
    for x, y in DataLoader(Numbers(), batch_size=4, num_workers=2):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x * 0.01), y).backward()
        optimizer.step()
        time.sleep(0.02)
