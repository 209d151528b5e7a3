# ranks 3; expect AR746; says 12 samples of 10.*ranks 1 and 2; guilty; limit 40
import torch.distributed as dist
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from job import DDP, loader, mark, network, nn, samples, start, time, torch

start()
model = DDP(network())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = samples(10)
held_out = DataLoader(data, batch_size=2, sampler=DistributedSampler(data, shuffle=False))
for epoch in range(8):
    for x, y in loader():
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        time.sleep(0.01)
    mark()
    correct = torch.zeros(2)
    with torch.no_grad():
        for x, y in held_out:  #@guilty
            correct += torch.tensor([(model(x).argmax(1) == y).sum(), len(y)])
    dist.all_reduce(correct)
