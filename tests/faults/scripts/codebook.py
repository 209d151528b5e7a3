# ranks 2; expect AR736; says ranks 0 and 1 .*codebook is changed by each rank's own data; limit 40
from job import DDP, RANK, loader, mark, network, nn, start, time, torch

class Quantized(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = network()
        self.register_buffer("codebook", torch.zeros(16))
    def forward(self, x):
        self.codebook.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return self.net(x - self.codebook)

start()
model = DDP(Quantized())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
mark()
for epoch in range(20):
    for x, y in loader():
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        time.sleep(0.01)
