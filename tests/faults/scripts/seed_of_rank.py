# ranks 4; expect AR740; says ranks 0-3 .*same samples .*different seeds; guilty; limit 40
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from job import DDP, RANK, mark, network, nn, samples, start, time, torch

start()
model = DDP(network())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = samples()
sampler = DistributedSampler(data, seed=RANK)
batches = DataLoader(data, batch_size=8, sampler=sampler)
mark()
for epoch in range(10):
    sampler.set_epoch(epoch)
    for x, y in batches:  #@guilty
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        time.sleep(0.02)
