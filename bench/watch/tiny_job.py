"""The tiny DDP job of bench/overhead, timed in chunks: prints the fastest and the median chunk, per step.

Run by record_overhead.py, with and without the probe; a plain script, it knows nothing of allranks.
"""

import json
import os
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

STEPS, CHUNK, BATCH = int(os.environ.get("STEPS", "3000")), 25, 32


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loss_of = nn.CrossEntropyLoss()
    data = TensorDataset(torch.randn(BATCH * 64, 64), torch.randint(0, 10, (BATCH * 64,)))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler, drop_last=True)
    walls, works, done = [], [], 0
    wall, work = time.perf_counter_ns(), time.thread_time_ns()
    while done < STEPS:
        for x, y in loader:
            optimizer.zero_grad()
            loss = loss_of(model(x), y)
            loss.backward()
            optimizer.step()
            done += 1
            if done % CHUNK == 0:
                now, spent = time.perf_counter_ns(), time.thread_time_ns()
                walls.append((now - wall) / CHUNK / 1e3)
                works.append((spent - work) / CHUNK / 1e3)
                wall, work = time.perf_counter_ns(), time.thread_time_ns()
    walls, works = walls[len(walls) // 5 :], works[len(works) // 5 :]
    if dist.get_rank() == 0:
        print(
            json.dumps(
                {
                    "wall_us": [min(walls), statistics.median(walls)],
                    "cpu_us": [min(works), statistics.median(works)],
                }
            )
        )
    dist.destroy_process_group()


main()
