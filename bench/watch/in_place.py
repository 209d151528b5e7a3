"""What does each mark cost where it is, between torch's own calls? Clocks before and behind the original, inside and outside of the mark.

    python bench/watch/in_place.py [--steps 6000]

In turn, for so many steps each, the clocks stand around the mark and around a call that only passes on: what that shows is what clocks
and their own calls cost there (some 8 us a step), and the difference is the mark's. Printed for each mark, in microseconds a step: the
difference of medians, which has what each step pays, and of means (the slowest hundredth left out), which has the steps looked at, too.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any

BLOCK = 250
"""Steps with the marks, then without."""
LEFT_OUT = 1000
"""Steps at the beginning, in which marks that look for something only then are still there."""

spent: dict[str, dict[bool, list[int]]] = defaultdict(lambda: {True: [], False: []})
"""By mark and whether it is in place: ns in each step."""
_now: dict[str, int] = {}
_is_marked = True


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
        chosen = marked if _is_marked else inner
        began = perf_counter_ns()
        try:
            return chosen(*args, **kwargs)
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
    """The same of the global hooks of optimizers, which are ours as a whole; they count steps, so they stay while clocks are measured."""

    def nothing(*_: Any) -> None:
        pass

    for key, hook in list(hooks.items()):

        def timed(*args: Any, hook: Callable[..., Any] = hook) -> None:
            if not _is_marked:
                began = perf_counter_ns()
                nothing(*args)
                _now[name] = _now.get(name, 0) + perf_counter_ns() - began
                hook(*args)
                return
            began = perf_counter_ns()
            hook(*args)
            _now[name] = _now.get(name, 0) + perf_counter_ns() - began

        hooks[key] = timed


def main(steps: int) -> None:
    global _is_marked
    import torch
    import torch.distributed as dist
    import torch.utils.data.dataloader as loading
    from in_turn import plain_job
    from torch.nn.parallel import DistributedDataParallel
    from torch.optim import optimizer as optimizers

    model, optimizer, loss_of, loader = plain_job(LEFT_OUT + steps)
    batches = iter(loader)
    whole: list[int] = []
    for number in range(LEFT_OUT + steps):
        if number == LEFT_OUT:
            between("backward", torch.autograd, "backward")
            between("forward", DistributedDataParallel, "forward")
            between("next batch", loading._BaseDataLoaderIter, "__next__")
            around_hooks("step begins", optimizers._global_optimizer_pre_hooks)
            around_hooks("step ends", optimizers._global_optimizer_post_hooks)
        began = perf_counter_ns()
        x, y = next(batches)
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()
        whole.append(perf_counter_ns() - began)
        if number % BLOCK > BLOCK // 5:  # not while what was switched settles
            for name, ns in _now.items():
                spent[name][_is_marked].append(ns)
        _now.clear()
        _is_marked = number // BLOCK % 2 == 0
    print(f"a step: median {statistics.median(whole) / 1e3:.0f} us (with these clocks)")
    total = [0.0, 0.0]
    for name, found in spent.items():
        row = [(f(found[True]) - f(found[False])) / 1e3 for f in (statistics.median, _trimmed_mean)]
        total = [a + b for a, b in zip(total, row, strict=True)]
        print(f"{name:12} median {row[0]:6.2f} us   mean {row[1]:6.2f} us")
    print(f"{'all':12} median {total[0]:6.2f} us   mean {total[1]:6.2f} us")
    dist.destroy_process_group()


def _trimmed_mean(values: list[int]) -> float:
    kept = sorted(values)
    return statistics.fmean(kept[: len(kept) - max(1, len(kept) // 100)])


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=6000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        os.environ.setdefault("RANK", "0")
        from allranks.record import startup

        startup.begin(folder)
        main(options.steps)
