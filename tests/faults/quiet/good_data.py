# ranks 2
"""Data as they should be: set_epoch, shares, seeds of the rank, a split seeded alike, an iterable split, evaluation on all of it."""
import os, sys, time
sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "scripts"))
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info, random_split
from torch.utils.data.distributed import DistributedSampler
from job import RANK, network, samples, start

class Noisy(Dataset):
    def __init__(self, data): self.data = data
    def __len__(self): return len(self.data)
    def __getitem__(self, index):
        x, y = self.data[index]
        return x + 0.1 * torch.randn(16), y

class Stream(IterableDataset):
    def __iter__(self):
        info = get_worker_info()
        for i in range(RANK * 2 + info.id, 40, 4):
            yield torch.full((16,), i / 40)

if __name__ == "__main__":
    start()
    trained, held_out = random_split(samples(), [560, 80], generator=torch.Generator().manual_seed(0))
    model = DDP(network())
    torch.manual_seed(RANK)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=100)
    sampler = DistributedSampler(trained)
    batches = DataLoader(Noisy(trained), batch_size=8, sampler=sampler, num_workers=1, persistent_workers=True)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in batches:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            scheduler.step()
            time.sleep(0.01)
        with torch.no_grad():
            for x, y in DataLoader(held_out, batch_size=8):  # all of it on each rank
                model(x)
            for x in DataLoader(Stream(), batch_size=4, num_workers=2):
                model(x)
            dist.all_reduce(torch.zeros(2))
    dist.destroy_process_group()
