"""How does a batch come to the device? Any nesting of tensors; on CUDA copied one batch ahead on a stream of its own."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from functools import partial
from typing import Any

import torch

from allranks import record
from allranks.record.values import Phase


def map_tensors(function: Callable[[Any], Any], batch: Any) -> Any:
    """The same nesting with `function` applied to each tensor, and to each object that has a `to` method of its own.

    Knows mappings, named tuples, tuples, lists and dataclasses; other things stay as they are.
    """
    if isinstance(batch, torch.Tensor):
        return function(batch)
    if batch is None or isinstance(batch, (str, bytes, int, float)):
        return batch
    if isinstance(batch, Mapping):
        return _map_mapping(function, batch)
    if type(batch) in (list, tuple):
        return type(batch)(map_tensors(function, each) for each in batch)
    if callable(getattr(batch, "to", None)):
        return function(batch)  # moves itself: PackedSequence, a batch class of the user's
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(function, each) for each in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)([map_tensors(function, each) for each in batch])
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return _map_dataclass(function, batch)
    return batch


def _map_mapping(function: Callable[[Any], Any], batch: Mapping[Any, Any]) -> Any:
    moved = {key: map_tensors(function, value) for key, value in batch.items()}
    if type(batch) is dict:
        return moved
    if isinstance(batch, MutableMapping):
        clone = copy.copy(batch)  # keeps what a subclass carries beside its items
        clone.update(moved)
        return clone
    try:
        return type(batch)(moved)  # pyright: ignore[reportCallIssue]
    except TypeError:
        return moved


def _map_dataclass(function: Callable[[Any], Any], batch: Any) -> Any:
    clone = copy.copy(batch)
    for field in dataclasses.fields(batch):
        if hasattr(batch, field.name):
            # object.__setattr__: frozen dataclasses are common for batches
            object.__setattr__(clone, field.name, map_tensors(function, getattr(batch, field.name)))
    return clone


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch on `device`; does not wait for the copy where the memory is pinned."""

    def move(each: Any) -> Any:
        return each.to(device, non_blocking=True) if isinstance(each, torch.Tensor) else each.to(device)

    recorder = record.recorder()
    recorder.phase(Phase.COPY)
    try:
        return map_tensors(move, batch)
    finally:
        recorder.leave()


def on_device(batches: Iterator[tuple[Any, Any]], device: torch.device) -> Iterator[tuple[Any, Any]]:
    """The same batches on `device`. On the CPU there is nothing to do; on CUDA the next batch is copied meanwhile."""
    if device.type == "cpu":
        return batches
    if device.type == "cuda":
        return _prefetched(batches, device)
    return ((each, to_device(data, device)) for each, data in batches)


def _prefetched(batches: Iterator[tuple[Any, Any]], device: torch.device) -> Iterator[tuple[Any, Any]]:
    """One batch ahead on a side stream. Does not synchronize the device."""
    side = torch.cuda.Stream(device)

    def load() -> tuple[Any, Any] | None:
        pair = next(batches, None)
        if pair is None:
            return None
        with torch.cuda.stream(side):
            return pair[0], to_device(pair[1], device)

    ahead = load()
    while ahead is not None:
        current = torch.cuda.current_stream(device)
        current.wait_stream(side)
        # Without this the allocator may give the memory away when the loop drops the batch while kernels still read it.
        map_tensors(partial(_used_by, stream=current), ahead[1])
        ready, ahead = ahead, load()
        yield ready


def _used_by(each: Any, stream: Any) -> Any:
    if isinstance(each, torch.Tensor):
        if each.is_cuda:
            each.record_stream(stream)
        return each
    for value in each if isinstance(each, tuple) else getattr(each, "__dict__", {}).values():
        if isinstance(value, torch.Tensor):
            _used_by(value, stream)
    return each
