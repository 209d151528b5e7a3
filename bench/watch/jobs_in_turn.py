"""What does the record cost a job of two ranks? Marks taken off and put on again in turn, in blocks of a few steps, in one run.

    python bench/watch/jobs_in_turn.py [--job tiny|cnn|lm] [--pairs 40]

Prints the median, over pairs of blocks, of marked by plain processor time of the thread that trains (which waiting does not count to, nor
what others do on the machine), and the same of wall time. The tick thread and the agent are not in it: bench/watch/watched.py has all.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BATCH = 32
STEPS = {"tiny": 40, "cnn": 4, "lm": 3}
"""Of a block: about a tenth of a second."""


def rank_main(job: str, pairs: int, store: str) -> None:
    os.environ["JOB"] = job  # before job.py is imported: it chooses the model
    sys.path.insert(0, str(Path(__file__).parents[1] / "overhead"))

    import torch
    import torch.distributed as dist
    from in_turn import skip, switches
    from job import dataset  # pyright: ignore[reportMissingImports]
    from job import model as make_model
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.optim import optimizer as optimizers
    from torch.utils.data import DataLoader, Subset

    torch.set_num_threads(1)
    rank, steps = int(os.environ["RANK"]), STEPS[job]
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loss_of = nn.CrossEntropyLoss()
    loader = DataLoader(Subset(dataset(), range(BATCH * steps)), batch_size=BATCH)
    hooks = [optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks]
    kept, switched = [dict(found) for found in hooks], switches()

    def put(on: bool) -> None:
        for place, name, marked, plain in switched:
            setattr(place, name, marked if on else plain)
        for found, hook in zip(hooks, kept, strict=True):
            found.clear()
            if on:
                found.update(hook)

    def block() -> tuple[float, float]:
        began, wall = time.thread_time_ns(), time.monotonic_ns()
        for x, y in loader:
            optimizer.zero_grad()
            loss_of(model(x), y).backward()
            optimizer.step()
        return time.thread_time_ns() - began, time.monotonic_ns() - wall

    left_ns = time.monotonic_ns()
    rows: list[tuple[float, float]] = []
    for pair in range(pairs + 2):
        found = {}
        for on in (True, False) if pair % 2 else (False, True):
            put(on)
            dist.barrier()
            if on:
                skip(time.monotonic_ns() - left_ns)
            found[on] = block()
            if on:
                left_ns = time.monotonic_ns()
        if pair > 1:
            rows.append((found[True][0] / found[False][0], found[True][1] / found[False][1]))
        plain_us = found[False][0] / steps / 1e3
    put(True)
    cpu, walls = zip(*rows, strict=True)
    ratios = {"cpu": statistics.median(cpu), "wall": statistics.median(walls)}
    quarter = statistics.quantiles(cpu, n=4)
    print(json.dumps({"job": job, "rank": rank, **ratios, "quartiles": quarter, "cpu_us_a_step": plain_us}))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", choices=sorted(STEPS), default="tiny")
    parser.add_argument("--pairs", type=int, default=40)
    options = parser.parse_args()
    if "RANK" in os.environ:
        from allranks.record import startup

        startup.begin(os.environ["BENCH_FOLDER"])
        rank_main(options.job, options.pairs, os.environ["BENCH_STORE"])
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        more = {
            "BENCH_FOLDER": folder,
            "BENCH_STORE": f"{folder}/store",
            "WORLD_SIZE": "2",
            "OMP_NUM_THREADS": "1",
        }
        ranks = [
            subprocess.Popen([sys.executable, *sys.argv], env={**os.environ, **more, "RANK": str(rank)})
            for rank in range(2)
        ]
        sys.exit(max(rank.wait() for rank in ranks))


if __name__ == "__main__":
    main()
