# ranks 2; expect AR735; says ranks 0 and 1 .*learning rates differ: 0.1 on rank 0, 0.01 on rank 1; guilty; limit 40
from job import DDP, RANK, loader, mark, network, nn, start, time, torch

start()
model = DDP(network())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, min_lr=0.001)
for epoch in range(20):
    for x, y in loader():
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        time.sleep(0.005)
    if epoch == 3:
        mark()
    scheduler.step(1.0 / (1 + epoch) if RANK == 0 else 1.0)  #@guilty
