# ranks 2; expect AR724; says 2 of 10 micro-steps of a pass have no effect; guilty; limit 20
from job import DDP, loader, mark, network, nn, samples, start, time, torch

start()
model = DDP(network())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = loader(samples(160))
mark()
for epoch in range(40):
    optimizer.zero_grad()  #@guilty
    for i, (x, y) in enumerate(batches):
        (nn.functional.cross_entropy(model(x), y) / 4).backward()
        if (i + 1) % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
        time.sleep(0.05)
