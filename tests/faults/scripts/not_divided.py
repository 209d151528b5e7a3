# ranks 2; expect AR741; says ranks 0 and 1 .*all 640 samples .*RandomSampler; guilty; limit 40
from torch.utils.data import DataLoader
from job import DDP, RANK, mark, network, nn, samples, start, time, torch

start()
torch.manual_seed(RANK)
model = DDP(network())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
mark()
for epoch in range(4):
    for x, y in DataLoader(samples(), batch_size=8, shuffle=True):  #@guilty
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        time.sleep(0.02)
