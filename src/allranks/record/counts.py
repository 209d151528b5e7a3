"""What do the light marks of quick steps (light.py) count in, and with what: compiled (_quick.c) where that is there, else Python?

Without the extension nothing is missing: all marks are the Python functions that they are anyway, and cost some 8 us a step more.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False  # as in writer.py
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    Hook = Callable[[Any, Any, Any], None]


class PlainCounts:
    """The counts in Python; `_quick.Counts` has the same attributes."""

    __slots__ = (
        "ask_at",
        "ask_every",
        "asked_ns",
        "asked_step",
        "data_key",
        "drawn",
        "drawn_word",
        "is_hook_counted",
        "is_on",
        "iterator",
        "micro_steps",
        "model",
        "optimizer",
        "optimizers",
        "step",
        "step_words",
        "syncs",
        "until",
        "until_syncs",
    )

    is_on: bool
    is_hook_counted: bool
    step: int
    micro_steps: int
    syncs: int
    drawn: int
    until: int
    until_syncs: int
    ask_at: int
    ask_every: int
    asked_step: int
    asked_ns: int
    model: int
    iterator: int
    optimizer: int
    data_key: int
    optimizers: dict[int, bool]
    step_words: memoryview
    drawn_word: memoryview


VERSION = 3  # of what _quick.c offers
QUICK_STEP_NS = 6_000_000
"""Steps below this are quick: a call into torch costs 5 us where its code is not in the processor's cache, so few of them have one."""


def _extension():
    if os.environ.get("ALLRANKS_NO_EXTENSION"):
        return None
    try:
        from allranks.record import _quick
    except ImportError:  # nothing was compiled, or for another Python
        return None
    is_of_this_source = getattr(_quick, "VERSION", 0) == VERSION
    return _quick if is_of_this_source else None


extension = _extension()
IS_COMPILED = extension is not None
Counts = PlainCounts if TYPE_CHECKING or extension is None else extension.Counts
FORWARD, BACKWARD, NEXT_BATCH = range(3)
"""Kinds of marks, as _quick.c numbers them."""


def _nothing() -> None:
    pass


def quicken(
    mark: Callable[..., Any],
    kind: int,
    light: Any,
    original: Callable[..., Any],
    failed: Callable[[BaseException, Any], None],
    resume: Callable[[], None],
    *,
    is_grad_enabled: Callable[[], Any] = _nothing,
    unsynchronised: Callable[[], None] = _nothing,
) -> Callable[..., Any]:
    """`mark`, which counts without Python while marks are light, where that was compiled; it does the same without.

    Args:
        failed: Called with what `original` raised, and its first argument.
        resume: Called after an `original` during which light marks were ended.
        is_grad_enabled: FORWARD: gradients are to come.
        unsynchronised: FORWARD: called if the backward of this forward does not average.
    """
    if extension is None:
        return mark
    return extension.quicken(mark, kind, light, original, failed, resume, is_grad_enabled, unsynchronised)


def hooks(light: Any, enter: Hook, leave: Hook) -> tuple[Hook, Hook]:
    """The two hooks of optimizers that count a step; those given are called where more than that is to be done."""
    return (enter, leave) if extension is None else extension.hooks(light, enter, leave)
