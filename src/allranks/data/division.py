"""Does an iterable data set divide itself, and are the samples of all ranks the same?"""

from __future__ import annotations

import zlib
from types import CodeType
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import IterableDataset

Division = Literal["whole", "rank", "own", "as workers"]
_RANK_NAMES = frozenset(
    {"get_rank", "get_world_size", "RANK", "WORLD_SIZE", "rank", "world_size", "num_replicas"}
)


def division_of(dataset: Any, sharded: bool | None) -> Division:
    """How a data set divides itself, from what its code looks at; `sharded` says it instead."""
    if sharded is not None:
        return "own" if sharded else "whole"
    names = _names_in(type(dataset))
    looks_at_worker = "get_worker_info" in names
    looks_at_rank = bool(names & _RANK_NAMES)
    if looks_at_worker and looks_at_rank:
        return "own"
    if looks_at_rank:
        return "rank"
    return "as workers" if looks_at_worker else "whole"


def _names_in(kind: type) -> set[str]:
    names: set[str] = set()
    for each in kind.__mro__:
        if each in (IterableDataset, object) or each.__module__.startswith("torch.utils.data"):
            continue
        for value in vars(each).values():
            function = getattr(value, "__func__", value)
            if isinstance(code := getattr(function, "__code__", None), CodeType):
                names |= _names_in_code(code)
    return names


def _names_in_code(code: CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names_in_code(constant)
        elif isinstance(constant, str):
            names.add(constant)
    return names


def fingerprint_of(samples: Any) -> int:
    """A 32-bit hash of samples: equal samples have equal ones in all processes; things without a stable content count
    by their type only."""
    return _crc(samples, 0)


def _crc(value: Any, crc: int) -> int:
    if isinstance(value, torch.Tensor):
        dense = value.detach().cpu().contiguous()
        return zlib.crc32(repr((dense.dtype, tuple(dense.shape))).encode() + _bytes_of(dense), crc)
    if isinstance(value, np.ndarray) and value.dtype != object:
        return zlib.crc32(np.ascontiguousarray(value).tobytes(), crc)
    if isinstance(value, dict):
        for key, each in value.items():
            crc = _crc(each, _crc(key, crc))
        return crc
    if isinstance(value, (list, tuple)):
        for each in value:
            crc = _crc(each, crc)
        return zlib.crc32(str(len(value)).encode(), crc)
    if isinstance(value, bytes):
        return zlib.crc32(value, crc)
    if value is None or isinstance(value, (str, int, float, complex, np.generic)):
        return zlib.crc32(repr(value).encode(), crc)
    return zlib.crc32(type(value).__qualname__.encode(), crc)


def _bytes_of(dense: torch.Tensor) -> bytes:
    if dense.layout is not torch.strided or dense.numel() == 0:
        return b""
    return dense.reshape(-1).view(torch.uint8).numpy().tobytes()
