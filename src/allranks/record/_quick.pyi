"""See _quick.c; it is not there where nothing was compiled."""

from collections.abc import Callable
from typing import Any

VERSION: int

class Counts:
    is_on: bool
    is_hook_counted: bool
    step: int
    micro_steps: int
    syncs: int
    drawn: int
    until: int
    until_syncs: int
    model: int
    iterator: int
    optimizer: int
    data_key: int
    optimizers: dict[int, bool]
    step_words: memoryview
    drawn_word: memoryview

def quicken(
    function: Callable[..., Any],
    kind: int,
    light: Counts,
    original: Callable[..., Any],
    failed: Callable[[BaseException, Any], None],
    resume: Callable[[], None],
    is_grad_enabled: Callable[[], bool],
    unsynchronised: Callable[[], None],
    /,
) -> Callable[..., Any]: ...
def hooks(
    light: Counts, enter: Callable[[Any, Any, Any], None], leave: Callable[[Any, Any, Any], None], /
) -> tuple[Callable[[Any, Any, Any], None], Callable[[Any, Any, Any], None]]: ...
