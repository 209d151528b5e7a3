# ranks 2; expect AR733; says ranks 0 and 1 .*averaged 0 times .*module inside; guilty; limit 40
from job import DDP, RANK, loader, mark, network, nn, start, time, torch

start()
model = DDP(network())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
mark()
for epoch in range(8):
    for x, y in loader():
        optimizer.zero_grad()
        nn.functional.cross_entropy(model.module(x), y).backward()  #@guilty
        optimizer.step()
        time.sleep(0.01)
