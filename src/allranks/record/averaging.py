"""Is a DistributedDataParallel trained whose gradients are never averaged? Asked now and then, and at the end.

    its forward is never called, but its parameters get gradients and are stepped: the script calls `.module`
    its forward is always under no_sync: averaging is never asked for

Scripts that average parameters or gradients themselves are left alone: one of their collectives has the size of a parameter.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

from allranks.record import compat, notes, process, states
from allranks.record import layout as at

_writer, _lines = process.WRITER, process.LINES
MODULE_STEPS = 3
"""Steps around a DDP before it is said; one that is only kept for its state dict is never stepped."""
NO_SYNC_STEPS = 500
"""Local steps between averages that a script may make on purpose; else it is said at the end."""
MIN_NUMEL = 16
_MAX_SUMS = 8
_MAX_CALLS = 4096  # of all modules, until the one inside must have been called
_built: list[Callable[[], Any]] = []
_lines_seen: dict[int, str] = {}  # of the forward of a module, by id of its DDP
_has_told = False
_next_look = 1  # a step; looks go through all parameters, so they are ever further apart


def built(ddp: Any) -> None:
    """A DDP was made. Never raises."""
    global _next_look
    try:
        _built.append(weakref.ref(ddp, _forget))
    except TypeError:
        return
    _next_look = 0


def _forget(gone: Any) -> None:
    _built[:] = [known for known in _built if known is not gone]


def look(*, is_end: bool = False) -> None:
    """Look at all DDPs that were made. Never raises."""
    global _has_told, _next_look
    step = _writer.step
    if _has_told or states.world is None or not _built or (step < _next_look and not is_end):
        return
    _next_look = step + max(1, step // 4)
    try:
        for known in list(_built):
            ddp = known()
            if ddp is not None and compat.keeps_equal(ddp, states.world) and _look_at(ddp, is_end):
                _has_told = True
                return
    except Exception:  # noqa: BLE001 - a model of a kind that is not known here
        _has_told = True


def _look_at(ddp: Any, is_end: bool) -> bool:
    step = _writer.step
    replica = states.replicas.get(id(ddp))
    why = "module" if replica is None else "no_sync"
    if (replica is not None and replica.syncs) or step < 1:
        return False
    trained = [(n, p) for n, p in ddp.module.named_parameters() if p.requires_grad]
    if not trained or all(p.grad is None for _, p in trained) or _averages_itself(trained):
        return False
    if id(ddp) not in _lines_seen:
        _find_line(ddp)
    if step < (MODULE_STEPS if why == "module" else NO_SYNC_STEPS) and not (is_end and step >= 2):
        return False
    if not _lines_seen.get(id(ddp)) and not is_end:
        return False  # its next forward tells
    notes.note(
        "never_averaged", why=why, step=step, line=_lines_seen.get(id(ddp), ""), sums=_sums(trained), names=len(trained),
    )  # fmt: skip
    return True


def _find_line(ddp: Any) -> None:
    """Have the next call of the module inside say where it is called from; once.

    By a hook of all modules: one on the user's own would be saved and copied with it.
    """
    key, inside, left = id(ddp), weakref.ref(ddp.module), _MAX_CALLS
    _lines_seen[key] = ""

    def tell(module: Any, inputs: Any) -> None:
        nonlocal left
        left -= 1
        if module is inside():
            _lines_seen[key] = _writer.name_of(_lines.here() >> 8)
            handle.remove()
        elif left <= 0:
            handle.remove()

    handle = sys.modules["torch"].nn.modules.module.register_module_forward_pre_hook(tell)


def _averages_itself(trained: list[tuple[str, Any]]) -> bool:
    """Whether one of the script's own last collectives is as large as a parameter, or as a good part of all."""
    sizes = {p.numel() for _, p in trained if p.numel() >= MIN_NUMEL}
    all_of_them = sum(p.numel() for _, p in trained)
    words = _writer.words
    for slot in range(at.NUM_SLOTS):
        numel = words[at.RING + at.SLOT_WORDS * slot + at.S_NUMEL]
        if numel in sizes or numel >= max(MIN_NUMEL, all_of_them // 10):
            return True
    return False


def _sums(trained: list[tuple[str, Any]]) -> list[list[Any]]:
    """The first parameters and the sum of the bits of each: what is not averaged differs soon."""
    torch = sys.modules["torch"]
    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    with torch.no_grad():
        return [
            [name, p.view(kinds[p.element_size()]).sum().item()]
            for name, p in trained[:_MAX_SUMS]
            if p.is_cpu and p.element_size() in kinds
        ]


def _after_fork() -> None:
    global _has_told, _next_look
    _has_told, _next_look = False, 0
    _built.clear()
    _lines_seen.clear()


process.AFTER_FORK.append(_after_fork)
