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
    torch.uint16, torch.uint32, torch.uint64,
)  # fmt: skip
_MAX_DIMS = 8
_SHAPE = 3  # where the shape begins in a header


def world_size() -> int:
    """Ranks in the default group; 1 without one."""
    return dist.get_world_size() if dist.is_initialized() else 1


_SINGLE = (int, float, complex, np.number, np.bool_, np.ndarray, torch.Tensor)  # bool is an int


def add_up(values: Any) -> torch.Tensor | None:
    """One rank's own sum of a number, a tensor, or an iterable of either, in float64 or int64; None for an empty iterable."""
    if isinstance(values, _SINGLE):
        return _widen(values)
    if not isinstance(values, Iterable) or isinstance(values, (str, bytes)):
        raise _no_number(values)
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


def _no_number(value: Any) -> UsageError:
    return UsageError(
        "AR160",
        f"cannot add up {str(value)[:60]!r}, which is a value of type {type(value).__name__}",
        fix="a number, a tensor or an array, an iterable of them, or a dict of these",
    )


def _widen(value: Any) -> torch.Tensor:
    if not isinstance(value, _SINGLE):
        raise _no_number(value)
    if isinstance(value, np.bool_):
        value = bool(value)  # torch 2.6 takes every scalar of numpy but this one
    try:
        tensor = value.detach() if isinstance(value, torch.Tensor) else torch.as_tensor(value)
    except (
        TypeError,
        ValueError,
        RuntimeError,
        OverflowError,
    ) as error:  # an array of objects, a number beyond int64
        raise _no_number(value) from error
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.to(torch.float64 if tensor.is_floating_point() else torch.int64)


def total(values: Any, name: str = "sum") -> Any:
    """The sum over all ranks: exact for whole numbers (up to 2**63), in float64 for others.

    Args:
        values: A number, a tensor, or an iterable of them (it may be empty on some ranks); a mapping is added up entry by entry.
        name: For messages.

    Returns:
        A Python number for scalars, otherwise a tensor of the values' shape; 0 if no rank had a value.
    """
    if isinstance(values, Mapping):
        return {key: total(values[key], f"{name}[{key!r}]") for key in _agreed_keys(values, name)}
    mine = _agree_on_shape(add_up(values), name)
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
        name: For messages.

    Returns:
        As `total`; NaN if all weights are 0.
    """
    if isinstance(values, Mapping):
        keys = _agreed_keys(values, name)
        if weight is not None and not _is_scalar(weight) and not isinstance(weight, Mapping):
            weight = list(weight)  # read once for each entry
        weights_of = weight if isinstance(weight, Mapping) else dict.fromkeys(keys, weight)
        return {key: average(values[key], weights_of[key], f"{name}[{key!r}]") for key in keys}
    kept = [(_widen(v), float(w)) for v, w in _pairs(values, weight) if float(w) != 0]
    mine = _agree_on_shape(add_up([v * w for v, w in kept]), name)
    if mine is None:
        return float("nan")
    weights = torch.tensor([sum(w for _, w in kept)], dtype=torch.float64)
    packed = torch.cat([mine.cpu().reshape(-1), weights])
    if world_size() > 1:
        dist.all_reduce(packed)
    result = packed[:-1].reshape(mine.shape) / packed[-1]
    return result.item() if result.ndim == 0 else result.to(mine.device)


def _is_scalar(value: Any) -> bool:
    return isinstance(value, _SINGLE) and getattr(value, "ndim", 0) == 0


def _pairs(values: Any, weight: Any) -> Sequence[tuple[Any, Any]]:
    if isinstance(values, _SINGLE):
        if weight is not None and not _is_scalar(weight):
            raise UsageError(
                "AR160",
                f"several weights for one value of shape {tuple(getattr(values, 'shape', ()))}",
                fix="a list of values with a weight for each; or run.mean(((v * w).sum() / w.sum()).item(), weight=w.sum())",
            )
        return [(values, 1 if weight is None else weight)]
    if not isinstance(values, Iterable) or isinstance(values, (str, bytes)):
        raise _no_number(values)
    values = list(values)
    if weight is None or _is_scalar(weight):
        return [(v, 1 if weight is None else weight) for v in values]
    weights = list(weight)
    if len(weights) != len(values):
        raise UsageError(
            "AR160", f"{len(values)} values, but {len(weights)} weights", fix="one weight for each value"
        )
    return list(zip(values, weights, strict=True))


def _agreed_keys(values: Mapping[Any, Any], name: str) -> list[Any]:
    """The mapping's keys, in rank 0's order: entries must meet their own kind. Collective."""
    keys = list(values)
    if world_size() == 1:
        return keys
    every = gather_objects([str(key) for key in keys])
    for rank, others in enumerate(every):
        if sorted(others) != sorted(every[0]):
            differ = sorted(set(others) ^ set(every[0])) or ["an entry"]
            who = rank if differ[0] in others else 0
            raise RanksDisagree(
                "AR161",
                f"{name}: only rank {who} of the ranks 0 and {rank} has the entry {differ[0]!r}",
                fix="a dict with the same keys on every rank; an empty list for what a rank does not have",
            )
    by_text = {str(key): key for key in keys}
    return [by_text[text] for text in every[0]]


def _header(tensor: torch.Tensor | None) -> torch.Tensor:
    """What ranks compare before tensors move: dtype, whether on a CPU, number of dimensions, shape; -1 for none."""
    header = torch.full((_SHAPE + _MAX_DIMS,), -1, dtype=torch.int64)
    if tensor is not None:
        if tensor.ndim > _MAX_DIMS or tensor.dtype not in _DTYPES:
            raise UsageError(
                "AR160",
                f"a tensor of {tensor.ndim} dimensions and {tensor.dtype}",
                fix=f"at most {_MAX_DIMS} dimensions, of floats, whole numbers, bool or complex: .to(torch.float32)",
            )
        header[0], header[1], header[2] = (
            _DTYPES.index(tensor.dtype),
            tensor.device.type == "cpu",
            tensor.ndim,
        )
        header[_SHAPE : _SHAPE + tensor.ndim] = torch.tensor(tensor.shape, dtype=torch.int64)
    return header


def _headers(tensor: torch.Tensor | None) -> list[list[int]]:
    mine = _header(tensor)
    if world_size() == 1:
        return [mine.tolist()]
    every = [torch.empty_like(mine) for _ in range(world_size())]
    dist.all_gather(every, mine)
    return [h.tolist() for h in every]


def _shape(header: list[int]) -> list[int]:
    return header[_SHAPE : _SHAPE + header[2]]


def _describe(header: list[int]) -> str:
    return f"{str(_DTYPES[header[0]]).removeprefix('torch.')}{_shape(header)}"


def _agree_on_shape(tensor: torch.Tensor | None, name: str) -> torch.Tensor | None:
    """Compare headers; a rank with nothing takes zeros of the others' shape. None if no rank has anything."""
    headers = _headers(tensor)
    present = [(rank, h) for rank, h in enumerate(headers) if h[0] >= 0]
    if not present:
        return None
    rank, first = present[0]
    for other_rank, other in present[1:]:
        if _shape(other) != _shape(first):
            raise RanksDisagree(
                "AR161",
                f"{name}: rank {rank} gives {_describe(first)}, rank {other_rank} gives {_describe(other)}",
                fix="the same shape on every rank; run.gather takes different first dimensions",
            )
    # A rank may hold whole numbers where another holds fractions (0 against 0.5): the widest type serves all.
    dtype = _DTYPES[min((h[0] for _, h in present), key=lambda i: 0 if _DTYPES[i].is_complex else 1 + i)]
    if tensor is None:
        return torch.zeros(_shape(first), dtype=dtype)
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
        if (
            header[0] != headers[0][0]
            or _shape(header)[1:] != _shape(headers[0])[1:]
            or header[2] != headers[0][2]
        ):
            raise RanksDisagree(
                "AR161",
                f"{name}: rank 0 gives {_describe(headers[0])}, rank {rank} gives {_describe(header)}",
                fix="the same dtype and the same dimensions after the first on every rank",
            )
    rows = [h[_SHAPE] for h in headers]
    if max(rows) == 0:
        return [tensor[:0] for _ in rows]
    device = tensor.device
    if any(h[1] for h in headers):  # a rank without a row has an empty tensor on the CPU: then all meet there
        tensor = tensor.cpu()
    return [part.to(device) for part in _gather_padded(tensor, rows)]


def _gather_padded(tensor: torch.Tensor, rows: list[int]) -> list[torch.Tensor]:
    # all_gather needs equal shapes (a shorter one aborts gloo or leaves garbage rows): pad, then cut.
    padded = tensor.new_zeros((max(rows), *tensor.shape[1:]))
    padded[: tensor.shape[0]] = tensor
    if padded.numel() == 0:
        return [padded[:n] for n in rows]
    # As bytes: backends differ in the dtypes they know (gloo has no int16).
    mine = padded.reshape(-1).view(torch.uint8)
    every = [torch.empty_like(mine) for _ in rows]
    dist.all_gather(every, mine)
    return [t.view(tensor.dtype).view(padded.shape)[:n] for t, n in zip(every, rows, strict=True)]


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
