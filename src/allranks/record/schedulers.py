"""How often is a learning rate scheduler stepped for each step of the optimizer, and with which value?

A scheduler that is stepped as often as there are ranks, step for step, is noted; and what a ReduceLROnPlateau is given, which is one
rank's own value as a rule. Later calls cost a dictionary look-up.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

from allranks.record import layout as at
from allranks.record import notes, process

_writer, _lines = process.WRITER, process.LINES
RUNS = 3
"""So many steps in a row, each followed by as many calls as there are ranks, are no accident."""
MAX_PLATEAUS = 8
_counted: weakref.WeakKeyDictionary[Any, _Count] = weakref.WeakKeyDictionary()
_plateaus = 0


class _Count:
    __slots__ = ("calls", "has_told", "runs", "step", "total")

    def __init__(self) -> None:
        self.step, self.calls, self.runs, self.total, self.has_told = _writer.step, 0, -1, 0, False


def mark_schedulers(module: Any) -> None:
    """The step of every class of schedulers that has one of its own."""
    base = getattr(module, "LRScheduler", None)
    for kind in list(vars(module).values()):
        if isinstance(kind, type) and base is not None and issubclass(kind, base) and "step" in vars(kind):
            is_plateau = kind.__name__ == "ReduceLROnPlateau"
            kind.step = (_plateau if is_plateau else _marked)(kind.step)  # type: ignore[attr-defined]


def _marked(step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def marked(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = step(self, *args, **kwargs)
        try:
            _count(self)
        except Exception:  # noqa: BLE001 - a count is not worth the user's step
            return result
        return result

    return marked


def _count(scheduler: Any) -> None:
    count = _counted.get(scheduler)
    if count is None:
        count = _counted[scheduler] = _Count()
        return  # its constructor steps it once
    if count.has_told:
        return
    world, step = _writer.words[at.W_WORLD_SIZE], _writer.step
    if step != count.step:
        is_right = step == count.step + 1 and count.calls == world > 1
        count.runs = count.runs + 1 if is_right or count.runs < 0 else 0
        count.step, count.calls = step, 0
        if (
            count.runs >= RUNS and "accelerate" not in sys.modules
        ):  # it does so on purpose, for schedules of one process
            count.has_told = True
            optimizer = getattr(scheduler, "optimizer", None)
            rates = [float(group["lr"]) for group in optimizer.param_groups] if optimizer is not None else []
            notes.note(
                "scheduler", name=type(scheduler).__name__, line=_writer.name_of(_lines.here(3) >> 8), per_step=world,
                calls=count.total, steps=step, rates=rates[:4],
            )  # fmt: skip
    count.calls += 1
    count.total += 1


def _plateau(step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def marked(self: Any, *args: Any, **kwargs: Any) -> Any:
        global _plateaus
        if _plateaus < MAX_PLATEAUS:
            _plateaus += 1
            try:
                value = float(args[0] if args else kwargs["metrics"])
                notes.note(
                    "plateau", name=type(self).__name__, line=_writer.name_of(_lines.here() >> 8), value=value
                )
            except Exception:  # noqa: BLE001 - torch itself will say what is wrong
                _plateaus = MAX_PLATEAUS
        return step(self, *args, **kwargs)

    return marked


def _after_fork() -> None:
    global _plateaus
    _counted.clear()
    _plateaus = 0


process.AFTER_FORK.append(_after_fork)
