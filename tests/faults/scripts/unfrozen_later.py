# ranks 2; expect AR734; says ranks 0 and 1 .*0.bias.* unfrozen after DDP was built; guilty; limit 40
from job import DDP, RANK, loader, mark, network, nn, start, time, torch

start()
net = network()
net[0].requires_grad_(False)
model = DDP(net)
net[0].requires_grad_(True)  #@guilty
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
mark()
for epoch in range(8):
    for x, y in loader():
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        time.sleep(0.01)
