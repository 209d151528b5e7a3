"""What was a DistributedDataParallel told, and what has it found? Noted now and then, for the search for what is slow."""

from __future__ import annotations

from typing import Any

from allranks.record import compat, notes, process, states

_FIRST = 8
_noted: dict[str, Any] = {}
_unused_bytes = 0


def look(replica: states.Replica, ddp: Any, count: int) -> None:
    """After the backward of a timed step, the `count`-th of this process. Never raises."""
    global _noted, _unused_bytes
    try:
        if count < _FIRST or count & (count - 1):  # the 8th, 16th, 32nd ...
            return
        facts = compat.replica_facts(ddp) | compat.device_facts(ddp)
        _unused_bytes = facts["unused_bytes"] = max(_unused_bytes, facts["unused_bytes"])
        facts |= {"uncovered_forward": bool(replica.is_uncovered), "autocast": replica.is_autocast}
        if replica.is_uncovered:
            line = int(replica.is_uncovered) >> 8
            facts |= {"uncovered_line": process.WRITER.name_of(line) if line else ""}
            facts |= {"exchanges": replica.syncs, "updates": process.WRITER.step}
        if facts != _noted:
            _noted = facts
            notes.note("replica", **facts)
    except Exception:  # noqa: BLE001 - a note is a help, never a reason to fail
        return
