# ranks 2; expect AR727; says each micro-batch counts the same, of 2 samples or of 30: one sample counts up to 15 times; guilty; limit 20
from job import DDP, RANK, mark, network, nn, samples, start, time, torch

start()
model = DDP(network())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = samples(480).tensors
mark()
for step in range(100):
    chunks = torch.randperm(480, generator=torch.Generator().manual_seed(step)).split([2, 30, 5, 11] * 10)
    optimizer.zero_grad()
    for k in range(2):
        own = chunks[2 * RANK + k]
        loss = nn.functional.cross_entropy(model(x[own]), y[own]) / 2
        loss.backward()  #@guilty
    optimizer.step()
    time.sleep(0.05)
