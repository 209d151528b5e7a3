"""What does the exchange of gradients cost by itself? One job, in turn with and without it, in the same processes.

    torchrun --standalone --nproc-per-node 2 bench/overhead/exchange.py           JOB=tiny|cnn|lm, ROUNDS=20

Every round times a block of steps of each loop, in another order each time: `solo` (no exchange), `gloo` (DDP as it is), `memory` (DDP, and
gradients through shared memory). One start for all, and other work on the machine meets all alike. Rank 0 prints medians, and ratios
to `gloo` within a round with their quartiles: of wall time, and of processor time, which other work on the machine disturbs less (all
threads of rank 0; what waits asleep costs none).
"""

import os
import random
import statistics
import time

import torch
import torch.distributed as dist
from job import BATCH, JOB, dataset, model
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from allranks.wrap.memory import share_memory

BLOCK = int(os.environ.get("BLOCK", {"tiny": 100, "cnn": 6, "lm": 2}[JOB]))
ROUNDS = int(os.environ.get("ROUNDS", "20"))


def make(kind: str) -> nn.Module:
    """The job's model for one loop."""
    module = model()
    if kind == "solo":
        return module
    replica = DistributedDataParallel(module, gradient_as_bucket_view=True)
    if kind == "memory":
        assert share_memory(replica, torch.device("cpu"), kind, is_required=True)
    return replica


def steps(
    module: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor, num: int
) -> tuple[float, float]:
    """Milliseconds per step: wall, processor."""
    dist.barrier()
    begun, busy = time.perf_counter(), time.process_time()
    for _ in range(num):
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(x), y).backward()
        optimizer.step()
    scale = 1e3 / num
    return (time.perf_counter() - begun) * scale, (time.process_time() - busy) * scale


def column(found: dict[str, list[tuple[float, float]]], kind: str, place: int) -> str:
    """The median time, and the ratio to gloo within a round."""
    mine, gloo = ([value[place] for value in found[k]] for k in (kind, "gloo"))
    low, middle, high = statistics.quantiles([m / g for m, g in zip(mine, gloo, strict=True)], n=4)
    return f"{statistics.median(mine):.3g} ms | {middle:.2f} ({low:.2f} to {high:.2f})"


def main() -> None:
    """Blocks in turn."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    x, y = dataset()[:BATCH]
    loops = {}
    for kind in ("solo", "gloo", "memory"):
        module = make(kind)
        loops[kind] = (module, torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9))
        steps(*loops[kind], x, y, 3)
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in loops}
    for number in range(ROUNDS):
        for kind in random.Random(number).sample(list(loops), len(loops)):
            found[kind].append(steps(*loops[kind], x, y, BLOCK))
    if dist.get_rank() == 0:
        print(f"{JOB}, {dist.get_world_size()} ranks, {ROUNDS} rounds, load average {os.getloadavg()[0]:.1f}")
        print("| loop | wall | x gloo | processor | x gloo |\n|---|---|---|---|---|")
        for kind in found:
            columns = [column(found, kind, place) for place in (0, 1)]
            print(f"| {kind} | {columns[0]} | {columns[1]} |")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
