# ranks 2; expect AR738; says ranks 0 and 1 .*LinearLR is stepped 2 times; guilty; limit 40
from job import DDP, loader, mark, network, nn, start, time, torch

start()
model = DDP(network())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=40)
mark()
for x, y in loader():
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    for _ in range(2):
        scheduler.step()  #@guilty
    time.sleep(0.05)
