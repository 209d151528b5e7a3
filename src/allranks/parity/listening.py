"""Which calls of torch and of allranks does parity listen to? Public ones where there are any; loaders have their own file.

Everything here lives in a process that parity started to be recorded: nothing of it is in a training of the user's.
"""

from __future__ import annotations

import atexit
import functools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.modules import module as torch_module
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from allranks.parity.loaders import listen_to_loaders
from allranks.parity.options import RecordOptions
from allranks.parity.recorder import Recorder
from allranks.parity.writer import Writer

DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")


def begin(folder: Path, options: RecordOptions, rank: int, world_size: int) -> Recorder | None:
    """Listen to torch; None if this process is not the rank but one that the rank started."""
    try:
        writer = Writer(folder, rank, world_size)
    except FileExistsError:
        return None
    recorder = Recorder(writer, options)
    random.seed(options.seed)
    np.random.seed(options.seed)
    torch.manual_seed(options.seed)
    listen_to_loaders(recorder)
    _listen_to_forwards(recorder)
    _listen_to_dropout(recorder)
    if not options.autocast:
        _switch_autocast_off()
    _listen_to_backward(recorder)
    _listen_to_optimizers(recorder)
    atexit.register(recorder.close, "script")
    return recorder


def _listen_to_forwards(recorder: Recorder) -> None:
    def enter(module: Any, args: Any) -> None:
        if recorder.is_on and not torch.compiler.is_compiling():
            recorder.enter(module)

    def leave(module: Any, args: Any, output: Any) -> None:
        if recorder.is_on and not torch.compiler.is_compiling():
            recorder.leave(module, output)

    torch_module.register_module_forward_pre_hook(enter)
    torch_module.register_module_forward_hook(leave, always_call=True)


def _listen_to_dropout(recorder: Recorder) -> None:
    def marked(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
            if p > 0 and training and recorder.is_on and torch.is_grad_enabled():
                if not recorder.options.dropout:
                    return input
                recorder.dropped()
            return function(input, p, training, inplace)

        return dropout

    for name in DROPOUTS:
        setattr(F, name, marked(getattr(F, name)))
    attention = F.scaled_dot_product_attention

    @functools.wraps(attention)
    def marked_attention(
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        *rest: Any,
        **more: Any,
    ) -> Any:
        if dropout_p > 0 and recorder.is_on:
            if recorder.options.dropout:
                recorder.dropped()
            else:
                dropout_p = 0.0
        return attention(query, key, value, attn_mask, dropout_p, *rest, **more)

    F.scaled_dot_product_attention = marked_attention


def _switch_autocast_off() -> None:
    make = torch.autocast.__init__

    @functools.wraps(make)
    def marked(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        make(self, device_type, enabled=False)

    torch.autocast.__init__ = marked


def _listen_to_backward(recorder: Recorder) -> None:
    backward = torch.autograd.backward

    @functools.wraps(backward)
    def marked(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if recorder.is_on and not recorder.in_library:
            given = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
            if len(given) == 1 and given[0].numel() == 1:
                recorder.backward(float(given[0].detach()))
        return backward(tensors, *args, **kwargs)

    torch.autograd.backward = marked


def _listen_to_optimizers(recorder: Recorder) -> None:
    outer: list[int] = []  # a sharded optimizer steps another one inside

    def before(optimizer: Any, args: Any, kwargs: Any) -> None:
        if recorder.is_on:
            if not outer:
                recorder.before_update(optimizer)
            outer.append(id(optimizer))

    def after(optimizer: Any, args: Any, kwargs: Any) -> None:
        if recorder.is_on and outer:
            outer.pop()
            if not outer:
                recorder.after_update(optimizer)

    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)


# -- allranks itself -----------------------------------------------------------------------------------------------------------


def to_rank_loaders(module: Any, recorder: Recorder) -> None:
    """RankLoader knows which samples of the global batch are this rank's own."""
    iterate = module.RankLoader.__iter__
    numbers: dict[int, int] = {}

    @functools.wraps(iterate)
    def marked(self: Any) -> Iterator[Any]:
        number = numbers.setdefault(id(self), 1000 + len(numbers))
        one = recorder.begin_pass(number) if recorder.is_on else None
        batches = iterate(self)
        try:
            while True:
                recorder.in_library += 1  # the torch loader inside is ours, not the user's
                try:
                    batch = next(batches)
                except StopIteration:
                    return
                finally:
                    recorder.in_library -= 1
                current = self.current
                if one is not None and recorder.is_on:
                    recorder.drew(one, batch, current.indices, is_stand_in=current.num_samples == 0)
                yield batch
        finally:
            batches.close()
            recorder.is_stand_in = False
            if one is not None and recorder.is_on:
                recorder.end_pass(one)

    module.RankLoader.__iter__ = marked


def to_runs(module: Any, recorder: Recorder) -> None:
    """Run.step and Run.backward know the weight of a loss."""
    for name in ("step", "backward"):
        setattr(module.Run, name, _with_loss(getattr(module.Run, name), recorder))


def _with_loss(function: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    @functools.wraps(function)
    def marked(self: Any, loss: Any, *, weight: float | None = None, **more: Any) -> Any:
        if not recorder.is_on:
            return function(self, loss, weight=weight, **more)
        with recorder.library_step(loss, weight):
            return function(self, loss, weight=weight, **more)

    return marked


def to_start(module: Any, folder: Path) -> None:
    """A recorded run must not resume from, or write into, the user's run directory: it gets one beside the recording."""
    start = module.start

    @functools.wraps(start)
    def elsewhere(run_dir: Any = None, **settings: Any) -> Any:
        return start(folder / "run", **settings)

    module.start = elsewhere
