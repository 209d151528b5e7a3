"""Which random numbers and which samples do the first batches hold? Noted where they are read, in the rank or in its loader workers.

Before and after each of the first reads the states of torch's, random's and numpy's generators are compared: if reading draws from one,
its state before says whether other ranks draw the same numbers. Of iterable data sets a hash of the first batches is noted: equal ones in
two workers, or on two ranks, are the same samples. Later reads cost one comparison.
"""

from __future__ import annotations

import functools
import random
import sys
import zlib
from collections.abc import Callable
from typing import Any

from allranks.record import compat, datasets, notes, process
from allranks.record import layout as at

LOOKS = 3
_writer = process.WRITER
_left = LOOKS
_left_iterable = LOOKS


def is_looking() -> bool:
    """Whether the next read is one of the first."""
    return _left > 0


def watched(fetch: Callable[..., Any], fetcher: Any, indices: Any) -> Any:
    """`fetch(fetcher, indices)`, looked at if it is one of the first."""
    global _left
    if not _left:
        return fetch(fetcher, indices)
    _left -= 1
    before = _states()
    batch = fetch(fetcher, indices)
    try:
        _note_draws(before, getattr(fetcher, "dataset", None))
    except Exception as error:  # noqa: BLE001 - a data set of a kind that is not known here
        _left = 0
        compat.step_aside("what reading draws", error)
    return batch


def watching(fetch: Callable[..., Any]) -> Callable[..., Any]:
    """The same of an iterable data set, with a hash of what came."""

    @functools.wraps(fetch)
    def marked(self: Any, indices: Any) -> Any:
        global _left_iterable
        if not _left_iterable:
            return fetch(self, indices)
        _left_iterable -= 1
        number = LOOKS - _left_iterable
        before = _states()
        batch = fetch(self, indices)
        try:
            _note_draws(before, self.dataset)
            if (value := content(batch)) is not None:
                _note("first", self.dataset, number=number, hash=value, items=_size(batch))
        except Exception as error:  # noqa: BLE001 - what is read is the user's
            _left_iterable = 0
            compat.step_aside("what a data set gives first", error)
        return batch

    return marked


def _states() -> dict[str, int] | None:
    """A hash of the state of each global generator."""
    try:
        torch, numpy = sys.modules["torch"], sys.modules.get("numpy")
        found = {
            "torch": zlib.crc32(torch.get_rng_state().numpy().tobytes())
            if numpy
            else hash(tuple(torch.get_rng_state().tolist())),
            "random": zlib.crc32(repr(random.getstate()).encode()),
        }
        if numpy is not None and "numpy.random" in sys.modules:
            _, keys, place, *rest = numpy.random.get_state()
            found["numpy"] = zlib.crc32(keys.tobytes()) ^ place ^ hash(tuple(rest)) & 0xFFFF
        return found
    except Exception:  # noqa: BLE001 - nothing is known of them then
        return None


def _note_draws(before: dict[str, int] | None, dataset: Any) -> None:
    global _left
    after = _states() if before is not None else None
    if before is None or after is None:
        return
    drawn = {name: before[name] for name in before if before[name] != after.get(name)}
    if drawn:
        _left = 0
        _note("draws", dataset, states=drawn)


def _note(kind: str, dataset: Any, **values: Any) -> None:
    words = _writer.words
    values |= {"dataset": type(dataset).__name__, "code": datasets.code_of(dataset)}
    if words[at.W_ROLE] == at.LOADER_WORKER:
        notes.note_for_rank(kind, worker=words[at.W_WORKER_ID], **values)
    else:
        notes.note(kind, worker=-1, **values)


def content(batch: Any) -> int | None:
    """A hash of a batch's tensors, arrays, numbers and texts; None where there is something else, or nothing that differs."""
    parts: list[bytes] = []
    if not _collect(batch, parts, 0) or not parts:
        return None
    raw = b"|".join(parts)
    return zlib.crc32(raw) if len(set(raw)) > 2 else None


def _collect(value: Any, parts: list[bytes], depth: int) -> bool:
    if isinstance(value, (int, float, str, bytes)):
        parts.append(repr(value).encode())
        return True
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        flat = value.detach().reshape(-1)[:1024] if hasattr(value, "detach") else value.reshape(-1)[:1024]
        parts.append(repr(flat.tolist()).encode())
        return True
    if isinstance(value, dict):
        return depth < 4 and all(_collect(v, parts, depth + 1) for v in value.values())
    if isinstance(value, (list, tuple)):
        return depth < 4 and all(_collect(v, parts, depth + 1) for v in value[:256])
    return False


def _size(batch: Any) -> int:
    first = batch[0] if isinstance(batch, (list, tuple)) and batch else batch
    try:
        return len(first)
    except TypeError:
        return 1


def _after_fork() -> None:
    global _left, _left_iterable
    _left = _left_iterable = LOOKS


process.AFTER_FORK.append(_after_fork)
