"""What do the marks of one step cost? One process, marks taken off and put on again in turn, 20 steps each.

    python bench/watch/in_turn.py [--pairs 150] [--numbers]

--numbers: only what looks at losses and parameters (record/losses.py, record/fingerprints.py) is taken off and put on; the
mean counts there, since a fingerprint is taken in few steps.

Both halves of a pair see the same load of the machine, so the median of their differences holds on a busy one.
World of one rank: nothing waits for anybody.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

STEPS = 20


def switches() -> list[tuple[object, str, Callable, Callable]]:
    """(object, attribute, marked, plain) of all that the probe put in place and a step passes."""
    import torch
    import torch.utils.data.dataloader as loading
    from torch.nn.parallel import DistributedDataParallel

    places = [
        (torch.autograd, "backward"),
        (DistributedDataParallel, "forward"),
        (DistributedDataParallel, "_sync_buffers"),
        (loading._BaseDataLoaderIter, "__next__"),
        (loading.DataLoader, "__iter__"),
    ]
    return [(place, name, vars(place)[name], vars(place)[name].__wrapped__) for place, name in places]


def put_numbers(on: bool) -> None:
    """Whether losses and parameters are looked at."""
    from allranks.record import fingerprints, losses, states

    losses.which = losses.EVERY if on else losses.NEVER
    if not on:
        put_numbers.next_step = fingerprints.next_step  # type: ignore[attr-defined]
        fingerprints.next_step = states.NEVER
    elif fingerprints.next_step == states.NEVER:
        fingerprints.next_step = put_numbers.next_step  # type: ignore[attr-defined]


def plain_job(steps: int) -> tuple[Any, Any, Any, Any]:
    """Model, optimizer, loss and loader of an ordinary DDP script, the tiny job, of so many steps a pass."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, TensorDataset

    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    data = TensorDataset(torch.randn(32 * steps, 64), torch.randint(0, 10, (32 * steps,)))
    return model, optimizer, nn.CrossEntropyLoss(), DataLoader(data, batch_size=32)


def main(pairs: int, *, only_numbers: bool = False) -> None:
    import torch.distributed as dist
    from torch.optim import optimizer as optimizers

    model, optimizer, loss_of, loader = plain_job(STEPS)
    hooks = [optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks]
    kept = [dict(found) for found in hooks]
    assert all(kept), "the probe is not installed"

    def put(on: bool) -> None:
        if only_numbers:
            put_numbers(on)
            return
        for place, name, marked, plain in switched:
            setattr(place, name, marked if on else plain)
        for found, hook in zip(hooks, kept, strict=True):
            found.clear()
            if on:
                found.update(hook)

    def steps() -> float:
        began = time.thread_time_ns()
        for x, y in loader:
            optimizer.zero_grad()
            loss_of(model(x), y).backward()
            optimizer.step()
        return (time.thread_time_ns() - began) / STEPS / 1e3

    switched = switches()
    rows: dict[bool, list[float]] = {True: [], False: []}
    for pair in range(pairs):
        for on in (True, False) if pair % 2 else (False, True):
            put(on)
            rows[on].append(steps())
    put(True)
    differences = [on - off for on, off in zip(rows[True], rows[False], strict=True)][pairs // 5 :]
    quarter = statistics.quantiles(differences, n=4)
    print(f"plain step   min {min(rows[False]):7.1f} us, median {statistics.median(rows[False]):7.1f} us")
    print(f"marked step  min {min(rows[True]):7.1f} us, median {statistics.median(rows[True]):7.1f} us")
    print(f"difference   mean   {statistics.fmean(differences):.2f} us per step")
    print(f"difference   median {quarter[1]:.2f} us per step, quartiles {quarter[0]:.2f} to {quarter[2]:.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=150)
    parser.add_argument("--numbers", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        os.environ.setdefault("RANK", "0")
        from allranks.record import startup

        startup.begin(folder)
        main(options.pairs, only_numbers=options.numbers)
