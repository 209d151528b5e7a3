# ranks 2; expect AR747; says 64 of 128 samples .*in the training set; guilty; limit 40
from torch.utils.data import DataLoader, Subset
from torch.utils.data.distributed import DistributedSampler
from job import DDP, mark, network, nn, samples, start, time, torch

start()
model = DDP(network())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = samples()
trained, held_out = Subset(data, range(0, 576)), Subset(data, range(512, 640))
sampler = DistributedSampler(trained)
batches = DataLoader(trained, batch_size=8, sampler=sampler)
for epoch in range(6):
    sampler.set_epoch(epoch)
    for x, y in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        time.sleep(0.01)
    mark()
    with torch.no_grad():
        for x, y in DataLoader(held_out, batch_size=8):  #@guilty
            model(x)
