# ranks 2; expect AR741; says ranks 0 and 1 .*all 640 samples .*Buckets; guilty; limit 40
"""A batch sampler of the user's own gives every batch to every rank."""
from torch.utils.data import DataLoader
from job import DDP, mark, network, nn, samples, start, time, torch

class Buckets:
    def __iter__(self):
        order = torch.randperm(640).tolist()
        yield from (order[i : i + 8] for i in range(0, 640, 8))
    def __len__(self):
        return 80

start()
model = DDP(network())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
batches = DataLoader(samples(), batch_sampler=Buckets())
for epoch in range(4):
    for x, y in batches:  #@guilty
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        time.sleep(0.01)
    mark()
