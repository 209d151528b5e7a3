# ranks 2; expect AR726; says val/accuracy: logged by rank 0 alone, and rank 0's own: covers 1/2; guilty; end
import os, sys
sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "modules", "site-packages"))
import wandb
from job import DDP, RANK, loader, mark, network, nn, samples, start, time, torch

start()
model = DDP(network())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
held_out = loader(samples(160))
mark()
for epoch in range(2):
    for x, y in loader():
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        time.sleep(0.01)
    correct = total = 0
    with torch.no_grad():
        for x, y in held_out:
            correct += (model(x).argmax(1) == y).sum().item()
            total += len(y)
    if RANK == 0:
        wandb.log({"val/accuracy": correct / total, "epoch": epoch})  #@guilty
