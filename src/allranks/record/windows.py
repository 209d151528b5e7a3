"""Are gradients thrown away that no optimizer step has used? Looked at where they are set to zero.

A script that accumulates k micro-steps for each step, and sets the gradients to zero when a new pass over its data begins, loses the last
micro-steps of each pass if their number does not divide by k. Said only where two windows of the same length were whole before, one
optimizer is in use, and a pass over the loader ended in between: what is skipped on purpose, or a second optimizer clears, is left alone.
The mark is taken off once a script has made so many steps of one micro-step each that it does not accumulate.
"""

from __future__ import annotations

import functools
from _thread import get_ident
from collections.abc import Callable
from typing import Any

from allranks.record import compiling, notes, process
from allranks.record import layout as at

_writer, _lines = process.WRITER, process.LINES
MIN_WINDOW = 2
WHOLE = 2
NO_WINDOWS = 64
_owner: Any = None  # id of the one optimizer, or of the model, that sets to zero
_is_off = False
_step = _drawn = _pass = _window = _whole = 0
_plain: dict[Any, Callable[..., Any]] = {}
"""The methods that are marked, by their class."""


def mark_zeroing(module: Any) -> None:
    """torch.optim.Optimizer.zero_grad."""
    _mark(module.Optimizer)


def mark_modules(module: Any) -> None:
    """torch.nn.Module.zero_grad."""
    _mark(module.Module)


def _mark(kind: Any) -> None:
    _plain[kind] = kind.zero_grad
    kind.zero_grad = _marked(kind.zero_grad)


def _marked(zero: Callable[..., Any]) -> Callable[..., Any]:
    writer = _writer

    @functools.wraps(zero)
    def marked(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_off and get_ident() == writer.owner:
            try:
                _look(self)
            except Exception:  # noqa: BLE001 - a look is not worth the user's step
                _stop()
        return zero(self, *args, **kwargs)

    return compiling.let_dynamo_see(marked, zero)


def _stop() -> None:
    global _is_off
    _is_off = True
    for kind, plain in _plain.items():
        if (
            getattr(kind.zero_grad, "__wrapped__", None) is plain
        ):  # else somebody else has put his own around it
            kind.zero_grad = plain
    _plain.clear()


def _look(owner: Any) -> None:
    global _owner, _step, _drawn, _pass, _window, _whole
    if _owner is None:
        _owner = id(owner)
    elif _owner != id(owner):  # a second model or optimizer: whose gradients are left over is not known
        _stop()
        return
    words, step = _writer.words, _writer.step
    number, drawn = words[at.LOADER + at.L_NUMBER], _writer.light.drawn
    if step == _step:
        micro = _writer.light.micro_steps  # since the last step
        if micro and _whole >= WHOLE and MIN_WINDOW <= _window > micro and _has_pass_ended():
            _tell(owner, micro)
    elif step != _step + 1:
        _whole = 0
    elif number == _pass:  # the window by the batches in it: micro-steps were counted anew at its end
        _whole = _whole + 1 if drawn - _drawn == _window else 1
        _window = drawn - _drawn
        if _window < MIN_WINDOW and _whole >= NO_WINDOWS:
            _stop()
    _step, _drawn, _pass = step, drawn, number


def _has_pass_ended() -> bool:
    words = _writer.words
    return words[at.LOADER + at.L_NUMBER] != _pass or words[at.LOADER + at.L_ENDED_NS] != 0


def _tell(owner: Any, micro: int) -> None:
    _stop()
    groups = getattr(owner, "param_groups", None)
    parameters = [p for g in groups for p in g["params"]] if groups is not None else list(owner.parameters())
    if all(p.grad is None for p in parameters):
        return  # nothing is left over: their backward was not called
    words = _writer.words
    words[at.LOADER + at.L_DRAWN] = _writer.light.drawn  # light marks do not keep it there
    place = next((p for p in (at.LOADER, at.LOADER_BEFORE) if words[p + at.L_NUMBER] == _pass), None)
    notes.note(
        "left_over", line=_writer.name_of(_lines.here() >> 8), micro_steps=micro, window=_window, step=_writer.step,
        drawn=words[place + at.L_DRAWN] if place else -1, loop=_writer.name_of(words[place + at.L_LINE]) if place else "",
    )  # fmt: skip


def _after_fork() -> None:
    global _owner, _is_off, _step, _drawn, _pass, _window, _whole
    _owner, _is_off = None, False
    _step = _drawn = _pass = _window = _whole = 0


process.AFTER_FORK.append(_after_fork)
