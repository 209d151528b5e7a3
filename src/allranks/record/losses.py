"""Is the loss a number? Looked at when backward is called on it, before its gradients are averaged with the others'.

The first one that is not is noted, with its step and line; then nothing is looked at any more. So the rank that was first is
known although a moment later the gradients of all ranks are nan. Of quick steps only some are looked at (a look takes 5 us
among other work), and the last one that was well is noted, too. A user who leaves such losses out is not bothered: only
what backward is called on counts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from time import monotonic_ns
from typing import Any

from allranks.record import gathered, notes, origin, passes, process, states, weights
from allranks.record import layout as at

_writer = process.WRITER
KIND = "not_finite"
EVERY, SOME, NEVER = range(3)
which = EVERY
"""SOME: those of the steps that are looked at (Writer.is_looked); EVERY: of the others, too, if their marks are whole."""
follow: Callable[[float | None], None] | None = None
"""Is told every loss, also of quick steps, while logged.py compares them with what the script logs."""


def following(see: Callable[[float | None], None] | None) -> None:
    """Tell `see` every loss from now on, also of quick steps; None: no longer."""
    global follow, which
    follow = see
    states.wants_all = see is not None
    if see is not None:
        which = EVERY if which != NEVER else NEVER
        _writer.may_be_light = False
        _writer.end_light(monotonic_ns())


_looked = _before = 0  # the last steps that were looked at, 1 = the first
NOTED = (
    at.next_preferred(0, 6),
    *(at.next_preferred(behind, at.EARLY_PREFERENCE) for behind in (0, 512)),
    at.next_preferred(4096, at.MAX_PREFERENCE),
)
"""Steps that every rank looks at, how quick they may be (the first but for the quickest ones): their losses are noted, for
perf/own_values.py to compare."""
_to_note = NOTED


def is_due() -> bool:
    """Whether the loss of a backward that begins now is looked at."""
    return which == EVERY or (which == SOME and _writer.is_looked)


def look(args: tuple[Any, ...], line: int) -> None:
    """Look at the loss in the arguments of backward; `line` as marks have it (number << 8). Never raises."""
    global which
    try:
        loss = args[0]
        if (gathered.gathers or _writer.step >= weights.due) and loss.numel() == 1:
            _look_into(loss, line)
        if loss.is_cpu and (states.is_quick or loss.numel() == 1):  # torch's error of several takes 20 us
            value, is_first = loss.item(), which != NEVER
            _judge(value, _writer.step + 1, line)
            if value - value != 0 and is_first:
                _note_origin(loss)
        elif loss.is_cuda and loss.numel() == 1:
            _look_later(loss, line)
    except Exception:  # noqa: BLE001 - several losses, or a tensor without a value: nothing to look at
        pass
    if which != NEVER:
        which = SOME if states.is_quick and follow is None else EVERY


def _look_into(loss: Any, line: int) -> None:
    """Of the first losses also what they are made of."""
    if gathered.gathers:
        gathered.look_at_loss(loss)
    if _writer.step >= weights.due:
        weights.look(loss, line)


def _note_origin(loss: Any) -> None:
    """Once: where it began, and which samples were in the batch."""
    found = origin.find(loss)
    indices = passes.batch if isinstance(passes.batch, (list, tuple)) else []
    rows = [r for r in found.get("rows", []) if r < len(indices)]
    chosen = [indices[r] for r in rows] if found.get("of") == len(indices) else list(indices[:32])
    samples = [i for i in chosen if isinstance(i, int)]
    notes.note(KIND, step=_writer.step + 1, samples=samples, is_row=bool(rows), **found)


def _judge(value: Any, step: int, line: int) -> None:
    global which, _looked, _before
    _writer.loss = value
    if follow is not None:
        follow(value)
    if _to_note and step >= _to_note[0]:
        _note(value, step)
    if step != _looked:
        _before, _looked = _looked, step
    if value - value == 0 or which == NEVER:
        return
    which = NEVER
    kind = at.NAN if value != value else at.PLUS_INF if value > 0 else at.MINUS_INF
    words, base = _writer.words, at.NOT_FINITE
    words[base + at.N_KIND], words[base + at.N_LINE] = kind, line >> 8
    words[base + at.N_NS], words[base + at.N_SOUND] = monotonic_ns(), _before
    words[base + at.N_STEP] = step


def _note(value: Any, step: int) -> None:
    """The first loss of a step that is compared between ranks."""
    global _to_note
    if step == _to_note[0] and value - value == 0 and _writer.words[at.W_WORLD_SIZE] > 1:
        notes.note("loss", step=step, value=value)
    while _to_note and _to_note[0] <= step:
        _to_note = _to_note[1:]


_on_its_way: tuple[int, int] | None = None  # step and line of the loss whose value is being copied
_room: Any = None  # where to, and the event that says that it is there


def _look_later(loss: Any, line: int) -> None:
    """On a GPU nobody waits: the value is copied behind what is queued, and looked at in a later backward."""
    global _on_its_way, _room
    cuda, torch = sys.modules["torch"].cuda, sys.modules["torch"]
    if cuda.is_current_stream_capturing():
        return
    if _room is None:
        _room = torch.zeros((), pin_memory=True), cuda.Event()
    value, event = _room
    if _on_its_way is not None:
        if not event.query():
            if follow is not None:
                follow(None)
            return
        _judge(value.item(), *_on_its_way)
        if which == NEVER:
            return
    value.copy_(loss.detach().reshape(()), non_blocking=True)
    event.record()
    _on_its_way = _writer.step + 1, line


def settle() -> None:
    """Look at the loss that was copied from a GPU, if it is there."""
    global _on_its_way
    if _on_its_way is not None and _room is not None and _room[1].query():
        where, _on_its_way = _on_its_way, None
        _judge(_room[0].item(), *where)


def _after_fork() -> None:
    global which, _looked, _before, _on_its_way, _room, _to_note
    which, _looked, _before, _on_its_way, _room, _to_note = EVERY, 0, 0, None, None, NOTED


process.AFTER_FORK.append(_after_fork)
