# ranks 2
"""Numbers logged as they should be: reduced, by all ranks, of the whole set on rank 0, handed over in files; and a learning rate."""
import os, sys, time
HERE = os.path.dirname(__file__)
sys.path[:0] = [os.path.join(HERE, "..", "scripts"), os.path.join(HERE, "..", "modules", "site-packages")]
import wandb
from job import DDP, RANK, DataLoader, dist, loader, network, nn, samples, start, torch

start()
model = DDP(network())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
KEPT = os.environ.get("FAULT_DIR", "/tmp")
held_out, whole = loader(samples(160)), DataLoader(samples(160), batch_size=8)

def accuracy(batches, model):
    counts = torch.zeros(2)
    with torch.no_grad():
        for x, y in batches:
            counts += torch.tensor([(model(x).argmax(1) == y).sum(), len(y)])
    return counts

for epoch in range(3):
    started = time.monotonic()
    for step, (x, y) in enumerate(loader(samples(320))):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        time.sleep(0.01)
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        wandb.log({"loss/own": loss.item()})
        if RANK == 0:
            wandb.log({"loss/mean": mean.item() / 2, "lr": scheduler.get_last_lr()[0]})
    scheduler.step()
    shares = accuracy(held_out, model)
    dist.all_reduce(shares)
    if RANK == 0:
        wandb.log({"val/accuracy": (shares[0] / shares[1]).item(), "epoch_s": time.monotonic() - started})
        counts = accuracy(whole, model.module)
        wandb.log({"val/whole": counts[0] / counts[1]})
    correct = accuracy(held_out, model)
    open(f"{KEPT}/{RANK}", "w").write(f"{correct[0]} {correct[1]}")
    dist.barrier()
    if RANK == 0:
        parts = [[float(word) for word in open(f"{KEPT}/{rank}").read().split()] for rank in range(2)]
        wandb.log({"test/accuracy": sum(p[0] for p in parts) / sum(p[1] for p in parts)})
dist.destroy_process_group()
