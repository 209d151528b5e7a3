"""What was a DistributedDataParallel told, and what has it found? Noted now and then, for the search for what is slow."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from allranks.record import compat, notes, process, states

_FIRST = 8
_noted: dict[str, Any] = {}
_unused_bytes = 0
_uncovered_line = ""


def uncovered(replica: states.Replica, here: Callable[[], int]) -> None:
    """Its forward was to exchange gradients, and yet the backward stands inside no_sync, at a line that is asked for once."""
    global _uncovered_line
    if not replica.is_uncovered:
        replica.is_uncovered = True
        _uncovered_line = process.WRITER.name_of(here() >> 8)


def look(replica: states.Replica, ddp: Any, count: int) -> None:
    """After the backward of a timed step, the `count`-th of this process. Never raises."""
    global _noted, _unused_bytes
    try:
        if count < _FIRST or count & (count - 1):  # the 8th, 16th, 32nd ...
            return
        facts = compat.replica_facts(ddp) | compat.device_facts(ddp)
        _unused_bytes = facts["unused_bytes"] = max(_unused_bytes, facts["unused_bytes"])
        facts |= {"uncovered_forward": replica.is_uncovered, "autocast": replica.is_autocast}
        facts["threads"] = sys.modules["torch"].get_num_threads()
        if replica.is_uncovered:
            facts |= {
                "uncovered_line": _uncovered_line,
                "exchanges": process.WRITER.light.syncs if len(states.replicas) == 1 else 0,
                "updates": process.WRITER.step,
            }
        if facts != _noted:
            _noted = facts
            notes.note("replica", **facts)
    except Exception:  # noqa: BLE001 - a note is a help, never a reason to fail
        return
