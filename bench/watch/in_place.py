"""What does each mark cost where it is, between torch's own calls? Clocks before and behind the original, inside and outside of the mark.

    python bench/watch/in_place.py [--steps 12000]

In turn, for so many steps each, the clocks stand around the mark and around a call that only passes on: what that shows is what clocks
and their own calls cost there (some 8 us a step), and the difference is the mark's. Printed for each mark, in microseconds: what a step
with light marks pays, what one pays at whose end more is due (a note, a fingerprint of the parameters, a look that begins), what one that
is looked at pays, and what that is a step, by how many there are of each. Means, without the slowest hundredth of each kind, in which
the process was interrupted. And the processor time of the record's own thread, a step.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any

BLOCK = 210
"""Steps with the marks, then without. Powers of two, at which something is due, fall on all parts of two blocks."""
LEFT_OUT = 1000
"""Steps at the beginning, in which marks that look for something only then are still there."""
CONTROL, LIGHT, DUE, LOOKED = "control", "light", "due", "looked at"

spent: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
"""By mark and kind of step: ns in each."""
_now: dict[str, int] = {}
_is_marked = True
_inner: dict[str, tuple[Callable[..., Any], list[int]]] = {}


def inside(place: Any, attribute: str) -> None:
    """Put clocks around the original at `place.attribute`, before it is marked."""
    plain, clock = vars(place)[attribute], [0, 0]

    @functools.wraps(plain)
    def inner(*args: Any, **kwargs: Any) -> Any:
        clock[0] = perf_counter_ns()
        try:
            return plain(*args, **kwargs)
        finally:
            clock[1] = perf_counter_ns()

    _inner[attribute] = inner, clock
    setattr(place, attribute, inner)


def outside(name: str, place: Any, attribute: str) -> None:
    """And around the mark, which is called as torch calls it."""
    marked, (inner, clock) = vars(place)[attribute], _inner[attribute]
    assert marked is not inner, "the probe is not installed"

    def note(began: int) -> None:
        _now[name] = _now.get(name, 0) + clock[0] - began + perf_counter_ns() - clock[1]

    def outer(*args: Any, **kwargs: Any) -> Any:
        chosen = marked if _is_marked else inner
        began = perf_counter_ns()
        try:
            return chosen(*args, **kwargs)
        finally:
            note(began)

    def backward(tensor: Any, gradient: Any, keep: Any, create: Any, *, inputs: Any) -> Any:
        chosen = marked if _is_marked else inner
        began = perf_counter_ns()
        try:
            return chosen(tensor, gradient, keep, create, inputs=inputs)
        finally:
            note(began)

    setattr(place, attribute, backward if attribute == "backward" else outer)


def around_hooks(name: str, hooks: dict[int, Callable[..., Any]]) -> None:
    """The same of the global hooks of optimizers, which are ours as a whole; they count steps, so they stay while clocks are measured."""

    def nothing(optimizer: Any, args: Any, kwargs: Any) -> None:
        pass

    for key, hook in list(hooks.items()):

        def timed(optimizer: Any, args: Any, kwargs: Any, hook: Callable[..., Any] = hook) -> None:
            if not _is_marked:
                began = perf_counter_ns()
                nothing(optimizer, args, kwargs)
                _now[name] = _now.get(name, 0) + perf_counter_ns() - began
                hook(optimizer, args, kwargs)
                return
            began = perf_counter_ns()
            hook(optimizer, args, kwargs)
            _now[name] = _now.get(name, 0) + perf_counter_ns() - began

        hooks[key] = timed


def main(steps: int, folder: str) -> None:
    global _is_marked
    import torch
    import torch.distributed as dist
    import torch.utils.data.dataloader as loading
    from in_turn import plain_job
    from torch.nn.parallel import DistributedDataParallel
    from torch.optim import optimizer as optimizers

    places = [
        ("next batch", loading._BaseDataLoaderIter, "__next__"),
        ("forward", DistributedDataParallel, "forward"),
        ("backward", torch.autograd, "backward"),
    ]
    for _, place, attribute in places:
        inside(place, attribute)
    from allranks.record import process, startup

    startup.begin(folder)
    dist.init_process_group = dist.distributed_c10d.init_process_group  # taken before it was marked
    model, optimizer, loss_of, loader = plain_job(LEFT_OUT + steps)
    batches = iter(loader)
    light, whole = process.WRITER.light, []
    [ticking] = [t for t in threading.enumerate() if t.name == "allranks-record"]
    clock = time.pthread_getcpuclockid(ticking.ident or 0)
    ticked = 0.0
    for number in range(LEFT_OUT + steps):
        if number == LEFT_OUT:
            for name, place, attribute in places:
                outside(name, place, attribute)
            around_hooks("step begins", optimizers._global_optimizer_pre_hooks)
            around_hooks("step ends", optimizers._global_optimizer_post_hooks)
            ticked = time.clock_gettime(clock)
        kind = (LIGHT if light.is_on else LOOKED) if _is_marked else CONTROL
        was_due = light.until, light.until_syncs
        began = perf_counter_ns()
        x, y = next(batches)
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()
        whole.append(perf_counter_ns() - began)
        if number % BLOCK > BLOCK // 5:  # not while what was switched settles
            for name, ns in _now.items():
                is_due = (
                    kind == LIGHT
                    and name == "step ends"
                    and (was_due != (light.until, light.until_syncs) or not light.is_on)
                )
                spent[name][DUE if is_due else kind].append(ns)
        _now.clear()
        _is_marked = number // BLOCK % 2 == 0
    print(f"a step: median {statistics.median(whole) / 1e3:.0f} us (with these clocks)")
    ticked = (time.clock_gettime(clock) - ticked) / steps * 1e6
    found = spent["step ends"]
    num = {kind: len(found[kind]) for kind in (LIGHT, DUE, LOOKED)}
    print(", ".join(f"{kind}: {count} steps" for kind, count in num.items()))
    total = dict.fromkeys((*num, "a step"), 0.0)
    for name, by_kind in spent.items():
        control = _trimmed_mean(by_kind[CONTROL])
        row = {kind: (_trimmed_mean(by_kind[kind]) - control) / 1e3 if by_kind[kind] else 0.0 for kind in num}
        if name != "step ends":
            row[DUE] = row[LIGHT]  # only at the end
        row["a step"] = sum(row[kind] * count for kind, count in num.items()) / sum(num.values())
        total = {kind: total[kind] + us for kind, us in row.items()}
        print(f"{name:12} " + "   ".join(f"{kind} {us:7.2f}" for kind, us in row.items()))
    print(f"{'all':12} " + "   ".join(f"{kind} {us:7.2f}" for kind, us in total.items()))
    print(f"the record's thread: {ticked:.2f} a step")
    dist.destroy_process_group()


def _trimmed_mean(values: list[int]) -> float:
    kept = sorted(values)
    return statistics.fmean(kept[: len(kept) - len(kept) // 100])


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=12000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as made:
        os.environ.setdefault("RANK", "0")
        main(options.steps, made)
