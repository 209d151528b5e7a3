"""What else is looked at when replicas are compared: buffers that each rank changes by itself, and parameters that never get a gradient.

Sampled where fingerprints are taken, so the cost is theirs. Buffers of normalisation layers are meant to be each rank's own; small ones
are counters; those that are not saved are caches.
"""

from __future__ import annotations

import sys
from typing import Any

from allranks.record import compat, notes, process, states

MIN_NUMEL = 8
MAX_BUFFERS = 8
BUFFER_LOOKS = 6
NEVER_LOOKS, NEVER_STEPS = 6, 30
"""A parameter without a gradient in so many looks, until so many steps, never gets one."""
_buffer_looks = _looks = 0
_without: set[str] | None = None
_last = (0, 0, False)


def look(step: int, seq: int, replicas: list[Any]) -> None:
    """After a step whose gradients are still there. Never raises."""
    try:
        _look(step, seq, replicas)
    except Exception:  # noqa: BLE001 - buffers of a kind that is not known here: replicas are compared all the same
        return


def _look(step: int, seq: int, replicas: list[Any]) -> None:
    global _buffer_looks, _looks, _without, _last
    compared = [ddp for ddp in replicas if compat.keeps_equal(ddp, states.world)]
    if len(compared) != 1:
        return
    ddp = compared[0]
    if _buffer_looks < BUFFER_LOOKS:
        _buffer_looks += 1
        _note_buffers(step, seq, ddp)
    if _without is None or _without:
        ignored = compat.ignored_parameters(ddp)
        trained = [(n, p) for n, p in ddp.module.named_parameters() if p.requires_grad and n not in ignored]
        now = {n for n, p in trained if p.grad is None}
        _without = now if _without is None else _without & now
        _looks += 1
        _last = step, _looks, bool(getattr(ddp, "find_unused_parameters", False))
        if _looks >= NEVER_LOOKS and step >= NEVER_STEPS:
            _tell()


def at_end() -> None:
    """The script has trained: fewer steps must do."""
    if _looks >= 3 and _last[0] >= 8:
        _tell()


def _tell() -> None:
    global _without
    if _without:
        step, looks, has_flag = _last
        notes.note(
            "never", names=sorted(_without)[:12], count=len(_without), step=step, looks=looks, flag=has_flag
        )
        _without = set()


def _note_buffers(step: int, seq: int, ddp: Any) -> None:
    torch = sys.modules["torch"]
    ignored, rows = compat.ignored_parameters(ddp), []
    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    with torch.no_grad():
        for prefix, module in ddp.module.named_modules():
            if "Norm" in type(module).__name__:
                continue
            own = compat.unsaved_buffers(module)
            for name, buffer in module.named_buffers(recurse=False):
                full = f"{prefix}.{name}".lstrip(".")
                is_state = name not in own and full not in ignored and buffer.is_floating_point()
                if (
                    is_state
                    and buffer.is_cpu
                    and buffer.numel() >= MIN_NUMEL
                    and buffer.element_size() in kinds
                    and len(rows) < MAX_BUFFERS
                ):
                    bits = buffer.contiguous().view(kinds[buffer.element_size()]).sum().item()
                    rows.append([full, bits, [float(v) for v in buffer.reshape(-1)[:16].tolist()]])
    if rows:
        notes.note(
            "buffers", step=step, seq=seq, rows=rows, broadcast=bool(getattr(ddp, "broadcast_buffers", True))
        )


def _after_fork() -> None:
    global _buffer_looks, _looks, _without, _last
    _buffer_looks, _looks, _without, _last = 0, 0, None, (0, 0, False)


process.AFTER_FORK.append(_after_fork)
