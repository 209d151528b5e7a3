"""The job by hand under torchrun: rank 0 saves every 25 updates, all load.  job_plain.py PROGRESS"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from work import EPOCHS, Progress, data, model

dist.init_process_group("gloo")
torch.manual_seed(1)
net = DistributedDataParallel(model())
adam = torch.optim.Adam(net.parameters(), lr=1e-3)
sampler = DistributedSampler(data(), seed=1)
loader = DataLoader(data(), batch_size=32, sampler=sampler)
path, updates = Path(sys.argv[1]).with_name("plain.pt"), 0
progress = Progress(sys.argv[1])
if path.exists():
    state = torch.load(path)
    net.load_state_dict(state["net"])
    adam.load_state_dict(state["adam"])
    updates = state["updates"]
for epoch in range(updates // len(loader), EPOCHS):
    sampler.set_epoch(epoch)
    for number, (x, y) in enumerate(loader):
        if epoch * len(loader) + number < updates:
            continue
        adam.zero_grad()
        F.cross_entropy(net(x), y).backward()
        adam.step()
        updates += 1
        if dist.get_rank() == 0:
            progress.say(updates)
            if updates % 25 == 0:
                torch.save(
                    {"net": net.state_dict(), "adam": adam.state_dict(), "updates": updates}, f"{path}.new"
                )
                Path(f"{path}.new").replace(path)
