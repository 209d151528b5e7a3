# ranks 2; expect AR269; says rank 0 .*went on after a backward had failed; tells rank 1 went on after a RuntimeError in forward, step 8; guilty
from job import DDP, RANK, loader, mark, network, nn, start, time, torch

start()
model = DDP(network())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for number, (x, y) in enumerate(loader()):
    try:
        if RANK == 1 and number == 7:
            x = x[:, :5]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    except RuntimeError:  #@guilty
        if number > 7:
            mark()
    time.sleep(0.01)
