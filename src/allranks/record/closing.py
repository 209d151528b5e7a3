"""What is looked at once more when the script has trained: before the process group goes, or at the end of the process.

Each look is guarded: at the end of a process nothing may go wrong because of us.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable

from allranks.record import averaging, fingerprints, gathered, passes, process, watched

LOOKS: list[Callable[[], None]] = [
    fingerprints.last,
    passes.at_end,
    gathered.look_at_sums,
    watched.at_end,
    lambda: averaging.look(is_end=True),
]
_is_registered = False


def register() -> None:
    """Have `look` called at the end of this process, too; a second time does nothing."""
    global _is_registered
    if not _is_registered:
        _is_registered = True
        atexit.register(look)


def look() -> None:
    """Look now, in the thread that trains."""
    for one in LOOKS:
        try:
            one()
        except Exception:  # noqa: BLE001 - see above
            continue


def _after_fork() -> None:
    global _is_registered
    _is_registered = False
    atexit.unregister(look)


process.AFTER_FORK.append(_after_fork)
