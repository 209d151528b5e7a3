# ranks 2; expect AR726; says loss/train: logged by rank 0 alone, and rank 0's own: covers 1/2; guilty; end
import os, sys
sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "modules", "site-packages"))
import wandb
from job import DDP, RANK, loader, mark, network, nn, start, time, torch

start()
model = DDP(network())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
step = 0
mark()
for epoch in range(3):
    for x, y in loader():
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        step += 1
        time.sleep(0.01)
        if RANK == 0 and step % 10 == 0:
            wandb.log({"loss/train": loss.item(), "lr": 0.01})  #@guilty
