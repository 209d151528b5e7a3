"""What do the marks of one step cost? One process, marks taken off and put on again in turn, 20 steps each.

    python bench/watch/in_turn.py [--rounds 600] [--numbers]

--numbers: only what looks at losses and parameters (record/losses.py, record/fingerprints.py) is taken off and put on.

What a pass over a loader costs once is not in it. A third part of each round is marked again: where it differs from the first as much
as plain does, nothing is told. That was so below 10 us of 700 on two cores of a machine with others on it: in_place.py tells less.
World of one rank: nothing waits for anybody. By processor time of the thread that trains; the record's own is in in_place.py.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

STEPS, SETTLE = 20, 10
"""Of a part, and before it: after a switch the code that is called now was in no cache."""
PASS = 3000


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


def skip(off_ns: int) -> None:
    """While the marks were off no time has passed for the record: else its steps would not look quick."""
    from allranks.record import process, states

    step, noted_ns = states.noted
    states.noted = step, noted_ns + off_ns
    process.WRITER.light.asked_ns += off_ns
    process.WRITER.timed_ns += off_ns


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


def main(rounds: int, *, only_numbers: bool = False) -> None:
    import torch.distributed as dist
    from torch.optim import optimizer as optimizers

    model, optimizer, loss_of, loader = plain_job(PASS)
    hooks = [optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks]
    kept = [dict(found) for found in hooks]
    assert all(kept), "the probe is not installed"
    batches = iter(loader)

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

    def steps(num: int) -> float:
        taken = []
        for x, y in itertools.islice(batches, num):
            optimizer.zero_grad()
            loss_of(model(x), y).backward()
            optimizer.step()
            taken.append(time.thread_time_ns())
        return statistics.median(later - one for one, later in itertools.pairwise(taken)) / 1e3

    switched = switches()
    rows: dict[str, list[float]] = {"marked": [], "plain": [], "marked again": []}
    kinds, left_ns = list(rows), time.monotonic_ns()
    for number in range(rounds):
        if number % (PASS // (len(kinds) * (SETTLE + STEPS))) == 0:
            batches = iter(loader)
        for kind in kinds if number % 2 else reversed(kinds):
            is_on = kind != "plain"
            put(is_on)
            if is_on and not only_numbers:
                skip(time.monotonic_ns() - left_ns)
            steps(SETTLE)
            rows[kind].append(steps(STEPS))
            if is_on:
                left_ns = time.monotonic_ns()
        kinds.append(kinds.pop(0))
    put(True)
    for kind in ("plain", "marked again"):
        differences = sorted(one - other for one, other in zip(rows["marked"], rows[kind], strict=True))
        mean = statistics.fmean(differences[rounds // 20 : -rounds // 20])  # without the outermost
        print(f"marked {statistics.median(rows['marked']):.1f} us a step (median), to {kind}: {mean:+.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=600)
    parser.add_argument("--numbers", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        os.environ.setdefault("RANK", "0")
        from allranks.record import startup

        startup.begin(folder)
        main(options.rounds, only_numbers=options.numbers)
