"""What do all ranks make of a value together? Sums, means, gathers, votes: exact, of uneven sizes, the same answer on every rank.

Every function here is **collective**: all ranks of the job call it, in the same order. Before tensors move, ranks compare a small
header (kind, dtype, shape), so a disagreement is an error that names both ranks and not a hang or a wrong number.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from allranks.core.errors import RanksDisagree, UsageError

_DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
    torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip
_MAX_DIMS = 8


def world_size() -> int:
    """Ranks in the default group; 1 without one."""
    return dist.get_world_size() if dist.is_initialized() else 1


def add_up(values: Any) -> torch.Tensor | None:
    """One rank's own sum of a number, a tensor, or an iterable of either, in float64 or int64; None for an empty iterable."""
    if isinstance(values, (int, float, bool, np.number, torch.Tensor)):
        return _widen(values)
    if not isinstance(values, Iterable) or isinstance(values, (str, bytes)):
        raise UsageError(
            "AR160",
            f"cannot add up a {type(values).__name__}",
            fix="a number, a tensor, or an iterable of them",
        )
    total: torch.Tensor | None = None
    for value in values:
        wide = _widen(value)
        if total is not None and total.shape != wide.shape:
            raise UsageError(
                "AR160",
                f"cannot add a value of shape {tuple(wide.shape)} to one of shape {tuple(total.shape)}",
                fix="give values of one shape, or add up each for itself",
            )
        total = wide if total is None else total + wide
    return total


def _widen(value: Any) -> torch.Tensor:
    tensor = value.detach() if isinstance(value, torch.Tensor) else torch.as_tensor(value)
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.to(torch.float64 if tensor.is_floating_point() else torch.int64)


def total(values: Any, name: str = "sum") -> Any:
    """The sum over all ranks: exact for whole numbers, in float64 for others.

    Args:
        values: A number, a tensor, or an iterable of them (it may be empty on some ranks).

    Returns:
        A Python number for scalars, otherwise a tensor of the values' shape; 0 if no rank had a value.
    """
    mine = add_up(values)
    mine = _agree_on_shape(mine, name)
    if mine is None:
        return 0
    if world_size() > 1:
        device = mine.device
        mine = mine.cpu() if device.type != "cpu" else mine.clone()
        dist.all_reduce(mine)
        mine = mine.to(device)
    return mine.item() if mine.ndim == 0 else mine


def average(values: Any, weight: Any = None, name: str = "mean") -> Any:
    """The mean over all ranks, weighted: the sum of value x weight over the sum of weights.

    Args:
        values: A number, a tensor, or an iterable of them; a mapping is averaged entry by entry.
        weight: The weight of each (a number, or an iterable as long as `values`), e.g. the samples it was taken over. 1 if not given.
            A value of weight 0 does not count, not even if it is NaN.

    Returns:
        As `total`; NaN if all weights are 0.
    """
    if isinstance(values, Mapping):
        return {key: average(value, weight, f"{name}[{key!r}]") for key, value in values.items()}
    pairs = list(_pairs(values, weight))
    kept = [(_widen(v).to(torch.float64), float(w)) for v, w in pairs if float(w) != 0]
    mine = _agree_on_shape(add_up([v * w for v, w in kept]), name)
    weights = torch.tensor(sum(w for _, w in kept), dtype=torch.float64)
    if mine is None:
        return float("nan")
    packed = torch.cat([mine.cpu().reshape(-1), weights.reshape(1)])
    if world_size() > 1:
        dist.all_reduce(packed)
    result = packed[:-1].reshape(mine.shape) / packed[-1]
    return result.item() if result.ndim == 0 else result.to(mine.device)


def _pairs(values: Any, weight: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(values, (int, float, np.number, torch.Tensor)):
        return [(values, 1 if weight is None else weight)]
    values = list(values)
    if weight is None:
        return [(v, 1) for v in values]
    if isinstance(weight, (int, float)):
        return [(v, weight) for v in values]
    weights = list(weight)
    if len(weights) != len(values):
        raise UsageError(
            "AR160", f"{len(values)} values, but {len(weights)} weights", fix="one weight for each value"
        )
    return list(zip(values, weights, strict=True))


def _header(tensor: torch.Tensor | None) -> torch.Tensor:
    header = torch.full((2 + _MAX_DIMS,), -1, dtype=torch.int64)
    if tensor is not None:
        if tensor.ndim > _MAX_DIMS:
            raise UsageError("AR160", f"a tensor of {tensor.ndim} dimensions", fix=f"at most {_MAX_DIMS}")
        header[0], header[1] = _DTYPES.index(tensor.dtype), tensor.ndim
        header[2 : 2 + tensor.ndim] = torch.tensor(tensor.shape, dtype=torch.int64)
    return header


def _headers(tensor: torch.Tensor | None) -> list[list[int]]:
    mine = _header(tensor)
    if world_size() == 1:
        return [mine.tolist()]
    every = [torch.empty_like(mine) for _ in range(world_size())]
    dist.all_gather(every, mine)
    return [h.tolist() for h in every]


def _describe(header: list[int]) -> str:
    return f"{str(_DTYPES[header[0]]).removeprefix('torch.')}{header[2 : 2 + header[1]]}"


def _agree_on_shape(tensor: torch.Tensor | None, name: str) -> torch.Tensor | None:
    """Compare headers; a rank with nothing takes zeros of the others' shape. None if no rank has anything."""
    headers = _headers(tensor)
    present = [(rank, h) for rank, h in enumerate(headers) if h[0] >= 0]
    if not present:
        return None
    rank, first = present[0]
    for other_rank, other in present[1:]:
        if other[1:] != first[1:]:
            raise RanksDisagree(
                "AR161",
                f"{name}: rank {rank} gives {_describe(first)}, rank {other_rank} gives {_describe(other)}",
                fix="the same shape on every rank; run.gather takes different first dimensions",
            )
    # A rank may hold whole numbers where another holds fractions (0 against 0.5): the widest type serves all.
    dtype = _DTYPES[min((h[0] for _, h in present), key=lambda i: 0 if _DTYPES[i].is_complex else 1 + i)]
    if tensor is None:
        return torch.zeros(first[2 : 2 + first[1]], dtype=dtype)
    return tensor.to(dtype)


def gather_rows(tensor: torch.Tensor, name: str = "gather") -> list[torch.Tensor]:
    """Every rank's tensor, in rank order; the first dimension may differ, also be 0. Same answer on every rank.

    Raises:
        RanksDisagree: AR161 the other dimensions or the dtypes differ.
    """
    if tensor.ndim == 0:
        tensor = tensor.reshape(1)
    tensor = tensor.detach()
    if world_size() == 1:
        return [tensor]
    headers = _headers(tensor)
    for rank, header in enumerate(headers):
        same_kind = header[0] == headers[0][0] and header[1] == headers[0][1]
        if not same_kind or header[3 : 2 + header[1]] != headers[0][3 : 2 + header[1]]:
            raise RanksDisagree(
                "AR161",
                f"{name}: rank 0 gives {_describe(headers[0])}, rank {rank} gives {_describe(header)}",
                fix="the same dtype and the same dimensions after the first on every rank",
            )
    rows = [h[2] for h in headers]
    longest = max(rows)
    if longest == 0:
        return [tensor[:0] for _ in rows]
    # all_gather needs equal shapes (a shorter one aborts gloo or leaves garbage rows): pad, then cut.
    padded = tensor.new_zeros((longest, *tensor.shape[1:]))
    padded[: tensor.shape[0]] = tensor
    every = [torch.empty_like(padded) for _ in rows]
    dist.all_gather(every, padded)
    return [t[:n] for t, n in zip(every, rows, strict=True)]


def gather_objects(value: Any) -> list[Any]:
    """Every rank's Python object, in rank order (pickled; for small things, from ranks of the same job)."""
    if world_size() == 1:
        return [value]
    data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    return [pickle.loads(t.numpy().tobytes()) for t in gather_rows(data)]


def any_rank(flag: object) -> bool:
    """Whether the flag is true on at least one rank."""
    return total(1 if flag else 0, "any") > 0


def every_rank(flag: object) -> bool:
    """Whether the flag is true on all ranks."""
    return total(1 if flag else 0, "all") == world_size()


def from_rank_zero(value: Any) -> Any:
    """Rank 0's value on every rank: one decision for all."""
    if world_size() == 1:
        return value
    box: Sequence[Any] = [value if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box, src=0)  # pyright: ignore[reportArgumentType]
    return box[0]
