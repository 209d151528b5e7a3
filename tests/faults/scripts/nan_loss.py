# ranks 2; expect AR730; says rank 1 .*loss became nan; guilty; limit 15
import time
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from job import RANK, loader, mark, network, start

start()
model = DDP(network())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
step = 0
for epoch in range(40):
    for x, y in loader():
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        if RANK == 1 and step == 20:
            mark()
            loss = loss * torch.log(x.sum() * 0 - 1)  #@guilty
        loss.backward()
        optimizer.step()
        time.sleep(0.01)
        step += 1
