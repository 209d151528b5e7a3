"""A recipe that starts mis-set: one loader worker that cannot keep up, tiny buckets, one thread. For bench/tune/compare.py."""

import time

import torch
import torch.nn.functional as F

import allranks


class SlowToRead(torch.utils.data.Dataset):
    """Pictures whose reading waits, as for a disk or a network."""

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(0.003)
        generator = torch.Generator().manual_seed(index)
        return torch.randn(3, 16, 16, generator=generator), index % 4


with allranks.start(global_batch_size=32, threads=1) as run:
    deep = [part for _ in range(24) for part in (torch.nn.Linear(48, 48), torch.nn.ReLU())]
    network = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, stride=2),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(392, 48),
        *deep,
        torch.nn.Linear(48, 4),
    )
    model = run.model(network, bucket_cap_mb=0.01)
    run.optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    loader = run.loader(SlowToRead(), shuffle=True, num_workers=1)
    for _ in run.epochs(1):
        for x, y in loader:
            run.step(F.cross_entropy(model(x), y))
