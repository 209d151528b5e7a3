"""Which samples does torch's DataLoader hand out? Heard at its iterator, the one place that knows the indices of each batch.

The iterator has no public name. Where a torch does not have it as expected, samples are told apart by their content instead.
"""

from __future__ import annotations

import functools
import inspect
from collections import deque
from typing import Any

import torch.utils.data.dataloader as torch_loader
from torch.utils.data import DataLoader, DistributedSampler

from allranks.parity.recorder import Recorder


def listen_to_loaders(recorder: Recorder) -> None:
    """DataLoader, its passes, and its batches."""
    _listen_to_making(recorder)
    iterators = getattr(torch_loader, "_BaseDataLoaderIter", None)
    if iterators is not None and hasattr(iterators, "_next_index") and hasattr(iterators, "_reset"):
        _listen_to_indices(iterators)
    _listen_to_batches(recorder)


def _listen_to_making(recorder: Recorder) -> None:
    make = DataLoader.__init__
    signature = inspect.signature(make)

    @functools.wraps(make)
    def marked(self: Any, *args: Any, **kwargs: Any) -> None:
        if not recorder.is_on or recorder.in_library or _is_in_library():
            make(self, *args, **kwargs)
            return
        bound = signature.bind(self, *args, **kwargs)
        given = {k: v for k, v in bound.arguments.items() if k not in ("self", "args", "kwargs")}
        number = recorder.num_loaders
        recorder.num_loaders += 1
        size = given.get("batch_size", 1) if given.get("batch_sampler") is None else None
        is_distributed = isinstance(given.get("sampler"), DistributedSampler)
        scaled_by = _factor(recorder, number, size, is_distributed)
        if scaled_by > 1 and isinstance(size, int):
            given["batch_size"] = size * scaled_by
        make(self, **given)
        self._allranks_parity = number
        recorder.writer.line(
            "loader", batch_size=size, is_distributed=is_distributed, where=_where(), scaled_by=scaled_by
        )

    DataLoader.__init__ = marked


def _factor(recorder: Recorder, number: int, size: Any, is_distributed: bool) -> int:
    """On one rank, a loader whose batches were one rank's own on many gets batches as large as all of theirs together."""
    options = recorder.options
    if options.scales_all and isinstance(size, int):
        return options.scale
    if (
        options.scale == 1
        or not is_distributed
        or not isinstance(size, int)
        or number >= len(options.loaders)
    ):
        return 1
    then = options.loaders[number]
    return options.scale if then["is_distributed"] and then["batch_size"] == size else 1


def _listen_to_indices(iterators: Any) -> None:
    draw, reset = iterators._next_index, iterators._reset

    @functools.wraps(draw)
    def marked_draw(self: Any) -> Any:
        indices = draw(self)
        self.__dict__.setdefault("_allranks_indices", deque()).append(indices)
        return indices

    @functools.wraps(reset)
    def marked_reset(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.__dict__["_allranks_indices"] = deque()
        return reset(self, *args, **kwargs)

    iterators._next_index, iterators._reset = marked_draw, marked_reset


def _listen_to_batches(recorder: Recorder) -> None:
    iterate = DataLoader.__iter__

    @functools.wraps(iterate)
    def marked(self: Any) -> Any:
        number = getattr(self, "_allranks_parity", None)
        if number is None or not recorder.is_on or recorder.in_library:
            return iterate(self)
        return _Listened(iterate(self), recorder, number)

    DataLoader.__iter__ = marked


class _Listened:
    """A pass over a DataLoader: its iterator, heard."""

    def __init__(self, inner: Any, recorder: Recorder, loader: int) -> None:
        self._inner, self._recorder = inner, recorder
        self._pass = recorder.begin_pass(loader)

    def __iter__(self) -> _Listened:
        return self

    def __len__(self) -> int:
        return len(self._inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __next__(self) -> Any:
        recorder = self._recorder
        try:
            batch = next(self._inner)
        except StopIteration:
            if recorder.is_on:
                recorder.end_pass(self._pass)
            raise
        if recorder.is_on:
            recorder.drew(self._pass, batch, self._indices())
        return batch

    def _indices(self) -> list[Any] | None:
        asked = self._inner.__dict__.get("_allranks_indices")
        if not asked:
            return None
        indices = asked.popleft()
        return (
            list(indices)
            if isinstance(indices, (list, tuple)) and indices and indices[0] is not None
            else None
        )


def _where() -> str:
    """The user's line, as file:line."""
    frame = inspect.currentframe()
    while frame is not None:
        path = frame.f_code.co_filename
        if "/torch/" not in path and "/allranks/" not in path:
            return f"{path.rsplit('/', 1)[-1]}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _is_in_library() -> bool:
    """Whether allranks makes this loader for itself."""
    frame = inspect.currentframe()
    for _ in range(4):
        frame = frame.f_back if frame is not None else None
        if frame is not None and frame.f_globals.get("__name__", "").startswith("allranks.data"):
            return True
    return False
