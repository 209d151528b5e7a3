# ranks 2
"""Gathers and averages as they should be: with a gradient, into views of one tensor, a mean in floating point; a rest that is stepped."""
import os, sys, time
sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "scripts"))
import torch.distributed.nn.functional as differentiable
from job import DDP, dist, loader, network, nn, samples, start, torch

start()
model = DDP(network())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = loader(samples(160))
for epoch in range(6):
    optimizer.zero_grad()
    for i, (x, y) in enumerate(batches):
        logits = model(x)
        everything = torch.cat(differentiable.all_gather(logits))
        loss = (everything @ everything.T).logsumexp(1).mean() + nn.functional.cross_entropy(logits, y)
        (loss / 4).backward()
        if (i + 1) % 4 == 0 or i + 1 == len(batches):
            optimizer.step()
            optimizer.zero_grad()
        time.sleep(0.01)
    values = torch.zeros(2, *logits.shape)
    dist.all_gather(list(values.unbind()), logits.detach())
    counts = [torch.zeros(2) for _ in range(2)]
    dist.all_gather(counts, torch.ones(2))
    torch.cat(counts).mean()
    correct = torch.tensor(10 + dist.get_rank())
    dist.all_reduce(correct)
    mean = correct / dist.get_world_size()
    assert mean == 10.5
dist.destroy_process_group()
