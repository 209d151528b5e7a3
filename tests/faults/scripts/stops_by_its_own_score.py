# ranks 2; expect AR265; says rank 1 .*left its loop; tells rank 0: bad = 0, patience = 3. rank 1: bad = 4, patience = 3; limit 8
"""Each rank counts its own evaluations without progress, and one has enough."""
import time
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from job import RANK, mark, network, samples, start
import torch

def main():
    model = DDP(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    best, bad, patience = 1e9, 0, 3
    x, y = samples()[:8]
    for step in range(1000):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        time.sleep(0.01)
        val_loss = 1.0 if RANK == 1 and step > 8 else 1.0 / (step + 1)
        if val_loss < best:
            best, bad = val_loss, 0
        else:
            bad += 1
        if bad > patience:
            mark()
            break
    dist.barrier()

start()
main()
