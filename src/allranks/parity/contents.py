"""What is in a batch? How many samples, and a hash of each sample's content."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import torch


def look_at(batch: Any) -> tuple[int, list[int] | None, str]:
    """Samples in the batch, a hash of each one's content (None if it holds no tensors), and the shape of one sample's content.

    A sample is a row of every tensor that has as many rows as the first.
    """
    tensors = [t for t in _tensors(batch) if t.ndim > 0]
    if not tensors:
        return (len(batch) if isinstance(batch, (list, tuple)) else 1), None, ""
    count = tensors[0].shape[0]
    rows = [
        t.detach().reshape(count, -1).cpu().contiguous()
        for t in tensors
        if t.shape[0] == count and not t.is_sparse
    ]
    hashes = [0] * count
    for tensor in rows:
        data = tensor.view(torch.uint8).numpy() if tensor.numel() else None
        for row in range(count if data is not None else 0):
            hashes[row] = zlib.crc32(data[row], hashes[row])  # type: ignore[index]  # narrowed by the range
    shape = ", ".join(f"{str(t.dtype).removeprefix('torch.')}{list(t.shape[1:])}" for t in tensors)
    return count, hashes, shape


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for key in value:
            yield from _tensors(value[key])
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)
