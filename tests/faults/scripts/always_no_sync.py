# ranks 2; expect AR733; says ranks 0 and 1 .*averaged 0 times .*under no_sync; guilty; limit 40
from job import DDP, loader, mark, network, nn, start, time, torch

start()
model = DDP(network())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
mark()
for epoch in range(2):
    for x, y in loader():
        optimizer.zero_grad()
        with model.no_sync():
            loss = nn.functional.cross_entropy(model(x), y)  #@guilty
        loss.backward()
        optimizer.step()
        time.sleep(0.01)
