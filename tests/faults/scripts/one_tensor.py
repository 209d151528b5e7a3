# ranks 2; expect AR722; says ranks 0 and 1 .*holds one tensor 2 times; guilty; limit 20
from job import DDP, dist, loader, mark, network, nn, start, time, torch

start()
model = DDP(network())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
mark()
for step, (x, y) in enumerate(loader()):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        losses = [torch.zeros(())] * dist.get_world_size()
        dist.all_gather(losses, loss.detach())  #@guilty
    time.sleep(0.1)
