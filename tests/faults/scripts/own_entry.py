# ranks 2; expect AR725; says only the own entry has a gradient: 1/2 of it is left; guilty; limit 20
from job import DDP, RANK, dist, loader, mark, network, start, time, torch

start()
model = DDP(network())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
mark()
for epoch in range(20):
    for x, _ in loader():
        features = torch.nn.functional.normalize(model(x), dim=1)
        gathered = [torch.zeros_like(features) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, features)  #@guilty
        gathered[RANK] = features
        everything = torch.cat(gathered)
        loss = (everything @ everything.T).logsumexp(1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(0.05)
