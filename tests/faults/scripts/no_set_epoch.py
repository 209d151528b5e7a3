# ranks 2; expect AR742; says ranks 0 and 1 .*same order .*DistributedSampler; guilty; limit 40
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from job import DDP, mark, network, nn, samples, start, time, torch

start()
model = DDP(network())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = samples(160)
batches = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))
for epoch in range(20):
    if epoch == 1:
        mark()
    for x, y in batches:  #@guilty
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        time.sleep(0.02)
