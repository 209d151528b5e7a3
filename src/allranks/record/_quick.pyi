"""See _quick.c; it is not there where nothing was compiled."""

from collections.abc import Callable
from typing import Any

from allranks.record.counts import PlainCounts as Counts
from allranks.record.pace import PlainPace as Pace  # noqa: F401

VERSION: int

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
