# ranks 2; expect AR737; says ranks 0 and 1 .*aux.bias, aux.weight never receive a gradient; limit 40
from job import DDP, loader, mark, network, nn, start, time, torch

class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.aux = network(), nn.Linear(16, 4)
    def forward(self, x):
        return self.net(x)

start()
model = DDP(Heads(), find_unused_parameters=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
mark()
for epoch in range(20):
    for x, y in loader():
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        time.sleep(0.01)
