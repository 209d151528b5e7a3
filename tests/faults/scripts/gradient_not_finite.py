# ranks 2; expect AR732; says rank 1 .*gradient of 2.* at step 21; limit 40
"""The square root of zero has an infinite gradient; its value is a number."""
from job import DDP, RANK, loader, mark, network, nn, start, time, torch

start()
model = DDP(network())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
step = 0
for epoch in range(40):
    for x, y in loader():
        optimizer.zero_grad()
        out = model(x)
        loss = nn.functional.cross_entropy(out, y)
        if RANK == 1 and step == 20:
            mark()
            loss = loss + (out * 0).square().sum().sqrt()
        loss.backward()
        optimizer.step()
        time.sleep(0.01)
        step += 1
