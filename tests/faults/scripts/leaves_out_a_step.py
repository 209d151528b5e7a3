# ranks 2; expect AR731; says 0.weight and 3 more .*differ ; limit 40
from job import DDP, RANK, loader, mark, network, nn, start, time, torch

start()
model = DDP(network())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
step = 0
for epoch in range(20):
    for x, y in loader():
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        step += 1
        if RANK == 1 and step == 21:
            mark()
            continue
        optimizer.step()
        time.sleep(0.01)
