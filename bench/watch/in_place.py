"""What does each mark cost where it is, between torch's own calls? Clocks before and behind the original, inside and outside of the mark.

    python bench/watch/in_place.py [--steps 3000]

Prints for each mark the median and the mean of what it adds before and after the call that it marks, in microseconds, per step. Medians of
single steps do not see what others do on the machine; a clock costs 0.06 us of each figure, which is taken off. The mean is trimmed by the
slowest hundredth, and has what marks do only now and then.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any

spent: dict[str, list[int]] = {}
"""By mark, ns in each step."""
_now: dict[str, int] = {}


def between(name: str, place: Any, attribute: str) -> None:
    """Put clocks around the mark at `place.attribute`, and around what it marks."""
    marked = vars(place)[attribute]
    plain, cell = _original(marked, attribute)
    inside = [0, 0]

    def inner(*args: Any, **kwargs: Any) -> Any:
        inside[0] = perf_counter_ns()
        try:
            return plain(*args, **kwargs)
        finally:
            inside[1] = perf_counter_ns()

    cell.cell_contents = inner

    def outer(*args: Any, **kwargs: Any) -> Any:
        began = perf_counter_ns()
        try:
            return marked(*args, **kwargs)
        finally:
            _now[name] = _now.get(name, 0) + inside[0] - began + perf_counter_ns() - inside[1]

    setattr(place, attribute, outer)


def _original(marked: Any, name: str) -> tuple[Callable[..., Any], Any]:
    """What a mark calls, and the cell of the closure that has it."""
    for cell in marked.__closure__ or ():
        found = cell.cell_contents
        if callable(found) and getattr(found, "__name__", "") == name:
            return found, cell
    raise LookupError(f"{marked} calls no original")


def around_hooks(name: str, hooks: dict[int, Callable[..., Any]]) -> None:
    """The same of the global hooks of optimizers, which are ours as a whole."""
    for key, hook in list(hooks.items()):

        def timed(*args: Any, hook: Callable[..., Any] = hook) -> None:
            began = perf_counter_ns()
            hook(*args)
            _now[name] = _now.get(name, 0) + perf_counter_ns() - began

        hooks[key] = timed


def main(steps: int) -> None:
    import torch
    import torch.distributed as dist
    import torch.utils.data.dataloader as loading
    from in_turn import plain_job
    from torch.nn.parallel import DistributedDataParallel
    from torch.optim import optimizer as optimizers

    model, optimizer, loss_of, loader = plain_job(steps)
    between("backward", torch.autograd, "backward")
    between("forward", DistributedDataParallel, "forward")
    between("next batch", loading._BaseDataLoaderIter, "__next__")
    for name, place, attribute in (
        ("indices", loading._BaseDataLoaderIter, "_next_index"),
        ("zero_grad", torch.optim.Optimizer, "zero_grad"),
    ):
        if "allranks" in vars(place)[attribute].__code__.co_filename:
            between(name, place, attribute)
    around_hooks("step begins", optimizers._global_optimizer_pre_hooks)
    around_hooks("step ends", optimizers._global_optimizer_post_hooks)

    whole: list[int] = []
    began = perf_counter_ns()
    for x, y in loader:
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()
        now = perf_counter_ns()
        whole.append(now - began)
        began = now
        for name, ns in _now.items():
            spent.setdefault(name, []).append(ns)
        _now.clear()
    print(f"a step: median {statistics.median(whole) / 1e3:.0f} us (with these clocks)")
    clock = statistics.median(_clock() for _ in range(1000))
    total = [0.0, 0.0]
    for name, found in spent.items():
        clocks = 1 if name.startswith("step ") else 2
        kept = sorted(found[len(found) // 10 :])
        kept = kept[: -max(1, len(kept) // 100)]
        row = [max(0, f(kept) - clocks * clock) / 1e3 for f in (statistics.median, statistics.fmean)]
        total = [a + b for a, b in zip(total, row, strict=True)]
        print(f"{name:12} median {row[0]:6.2f} us   mean {row[1]:6.2f} us")
    print(f"{'all':12} median {total[0]:6.2f} us   mean {total[1]:6.2f} us")
    dist.destroy_process_group()


def _clock() -> int:
    began = perf_counter_ns()
    return perf_counter_ns() - began


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=3000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        os.environ.setdefault("RANK", "0")
        from allranks.record import startup

        startup.begin(folder)
        main(options.steps)
