# ranks 2; expect AR740; says ranks 0 and 1 .*same samples .*% of them; guilty; limit 40
"""Each rank shuffles with a generator of its own and takes every second index."""
import os
from torch.utils.data import DataLoader, Sampler
from job import DDP, RANK, mark, network, nn, samples, start, time, torch

class EverySecond(Sampler):
    def __init__(self, data):
        self.generator = torch.Generator()
        self.generator.manual_seed(os.getpid())
        self.data = data
    def __iter__(self):
        yield from torch.randperm(len(self.data), generator=self.generator).tolist()[RANK::2]
    def __len__(self):
        return len(self.data) // 2

start()
model = DDP(network())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = samples()
batches = DataLoader(data, batch_size=8, sampler=EverySecond(data))
for epoch in range(6):
    for x, y in batches:  #@guilty
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        time.sleep(0.01)
    mark()
