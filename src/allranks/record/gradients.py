"""Is a gradient not finite although the loss was a number? Seen on the rank it arises on, before DDP averages it into all.

One parameter is watched: the one that gets its gradient last, since what becomes nan or infinite anywhere in a backward comes down to it.
Its hook sees this rank's own gradient; the cost is one look a step (ten a second of quick steps), however many parameters there are. It
is noted only when an optimizer steps with it: a gradient scaler that skips the step is as it should be. Then all gradients are looked at,
once: the last layers whose are finite are above the place where it began.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from allranks.record import compat, losses, notes, process, states

_writer = process.WRITER
MAX_NUMEL = 1 << 16
bad_at = -1  # the step (0 = the first) in whose backward this rank's own gradient was first not finite
_watched: Any = None  # weakly: the parameter and its DDP; () = nothing can be watched
_unhook: Callable[[], object] | None = None  # while the hook is there
is_on = True


def watch(ddp: Any) -> None:
    """Watch the gradients of a DDP that is used for the first time, if no other is. Never raises."""
    global _watched, _unhook
    if _watched is not None and (not _watched or _watched[0]() is not None):
        return
    _watched = _unhook = None  # the one before is gone, and its hook with it
    try:
        candidates = [p for p in ddp.module.parameters() if p.requires_grad and p.numel() <= MAX_NUMEL][:2]
        if not candidates or not candidates[0].is_cpu:
            return  # on a GPU a look would wait for it
        _watched = weakref.ref(min(candidates, key=lambda p: p.numel())), weakref.ref(ddp)
        look.__torch_unserializable__ = True  # type: ignore[attr-defined]  # else saving the tensor warns of a hook
        prepare()
    except Exception:  # noqa: BLE001 - parameters of a kind that is not known here
        _watched = ()


def prepare() -> None:
    """After a forward that is looked at: of quick steps the hook is there in those that are timed, since it costs 0.1 ms."""
    global _unhook
    if not is_on or not _watched or _unhook is not None or (states.is_quick and not _writer.is_timed):
        return
    if (parameter := _watched[0]()) is not None and parameter.requires_grad:
        _unhook = compat.hook(parameter, look)


def look(gradient: Any) -> None:
    """The hook: this rank's own gradient of the watched parameter. Goes after each call where steps are quick."""
    global bad_at, _unhook
    if _unhook is not None and (states.is_quick or not is_on):
        _unhook()
        _unhook = None
    if bad_at >= 0 or not is_on:
        return
    try:
        value = gradient.sum().item()
        if value - value != 0:
            bad_at = _writer.step
    except Exception:  # noqa: BLE001 - a sparse gradient
        bad_at = 1 << 62


def settle() -> None:
    """After a backward: nothing stays of a hook that has gone."""
    if _unhook is None and _watched and (parameter := _watched[0]()) is not None:
        compat.forget_hooks(parameter)


def stepping() -> None:
    """An optimizer is about to step; called only while a gradient that is not finite waits to be judged."""
    global bad_at, is_on
    step, bad_at = bad_at, -1
    parameter, ddp = (known() for known in _watched or (_nothing, _nothing))
    if step != _writer.step or parameter is None or ddp is None:
        return
    try:
        if losses.which == losses.NEVER or _is_finite(parameter.grad):
            return  # the loss was it, or it was mended
        is_on = False
        named = [(n, p) for n, p in ddp.module.named_parameters() if p.grad is not None]
        bad = [n for n, p in named if not _is_finite(p.grad)]
        notes.note(
            "gradient", step=step + 1, bad=bad[-1:] + bad[:4], num_bad=len(bad), num=len(named),
            sound=[n for n, p in named if n not in bad][:4], is_exact=not states.is_quick,
        )  # fmt: skip
    except Exception:  # noqa: BLE001 - see watch
        is_on = False


def is_waiting() -> bool:
    """Whether there is one to be judged."""
    return bad_at >= 0


def _nothing() -> None:
    return None


def _is_finite(gradient: Any) -> bool:
    if gradient is None:
        return True
    value = gradient.sum().item()
    return value - value == 0


def _after_fork() -> None:
    global bad_at, _watched, _unhook, is_on
    bad_at, _watched, _unhook, is_on = -1, None, None, True


process.AFTER_FORK.append(_after_fork)
