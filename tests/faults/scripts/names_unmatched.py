# ranks 2; expect AR728; says 0 of 4 names matched: self.shadow has 0.weight, the loop looks for module.0.weight; guilty; limit 20
from job import DDP, loader, mark, network, nn, start, time, torch


class Average:
    """A moving average of the weights, as scripts have it."""

    def __init__(self, model):
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}

    def update(self, model):
        for name, p in model.named_parameters():  #@guilty
            if name in self.shadow:
                self.shadow[name].lerp_(p.detach(), 0.01)


start()
model = network()
average = Average(model)
model = DDP(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
mark()
for epoch in range(10):
    for x, y in loader():
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        average.update(model)
        time.sleep(0.02)
