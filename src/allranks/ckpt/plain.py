"""How does state become values that can be read back without running code?

torch.load(weights_only=True) admits tensors and plain containers. What people keep in a state_dict is a little wider: NumPy
arrays and scalars, defaultdicts, deques. Those are turned into tagged plain values and back. Anything that would need code to
come back (a function, an instance of a class) is an error that names where in the state it lies, at the time of the save.
"""

from __future__ import annotations

import enum
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from allranks.core.errors import CheckpointError

_TAG = "__allranks__"
_ATOMS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
CopyTensor = Callable[[torch.Tensor, str], torch.Tensor]


def to_plain(value: Any, path: str, copy: CopyTensor) -> Any:
    """A copy of `value` out of tensors and plain containers; tensors go through `copy(tensor, path)`.

    Args:
        value: Any state.
        path: Where it lies, for errors and for `copy`: "optimizers.main".

    Raises:
        CheckpointError: AR606 a value would need code to be read back.
    """
    if type(value) in _ATOMS:
        return value
    if isinstance(value, torch.Tensor):
        return _plain_tensor(value, path, copy)
    if isinstance(value, Mapping):
        return _plain_mapping(value, path, copy)
    if type(value) in (list, tuple, set, frozenset, deque, torch.Size, bytearray):
        return _plain_sequence(value, path, copy)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        array = np.ascontiguousarray(value)
        raw = (
            torch.frombuffer(bytearray(array.tobytes()), dtype=torch.uint8) if array.size else torch.empty(0)
        )
        return {_TAG: "ndarray", "dtype": array.dtype.str, "shape": list(value.shape), "raw": raw}
    if isinstance(value, np.generic) and value.dtype.kind in "biufc":
        return {_TAG: "scalar", "dtype": value.dtype.str, "raw": value.tobytes()}
    raise _needs_code(value, path)


def _plain_tensor(tensor: torch.Tensor, path: str, copy: CopyTensor) -> torch.Tensor:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        raise _needs_code(tensor, path)
    if tensor.is_meta or tensor.layout != torch.strided:
        kind = "a meta tensor, which has no data" if tensor.is_meta else f"a {tensor.layout} tensor"
        raise CheckpointError(
            "AR606", f"{path} cannot be saved: it is {kind}", fix="materialize it before saving"
        )
    return copy(tensor.detach(), path)


def _plain_mapping(value: Mapping[Any, Any], path: str, copy: CopyTensor) -> Any:
    for key in value:
        if type(key) not in (str, int, float, bool, type(None), tuple, bytes) or (
            type(key) is tuple and not all(type(k) in _ATOMS for k in key)
        ):
            raise _needs_code(key, f"a key of {path}")
    items = {key: to_plain(item, f"{path}.{key}", copy) for key, item in value.items()}
    # Other mappings (defaultdict, a metric's own dict) come back as dict: their load_state_dict reads, and does not keep them.
    result: Any = OrderedDict(items) if isinstance(value, OrderedDict) else items
    return {_TAG: "mapping", "items": result} if _TAG in items else result


def _plain_sequence(value: Any, path: str, copy: CopyTensor) -> Any:
    if isinstance(value, torch.Size):
        return tuple(value)
    if isinstance(value, bytearray):
        return bytes(value)
    items = [to_plain(item, f"{path}[{i}]", copy) for i, item in enumerate(value)]
    if isinstance(value, list):
        return items
    if isinstance(value, tuple):
        return tuple(items)
    kind = type(value).__name__
    return {_TAG: kind, "items": items, "maxlen": value.maxlen if isinstance(value, deque) else None}


def _needs_code(value: Any, path: str) -> CheckpointError:
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    shown = f" ({value.name})" if isinstance(value, enum.Enum) else ""
    return CheckpointError(
        "AR606",
        f"{path} cannot be saved: it is a {kind}{shown}, and reading that back would run code",
        why="checkpoints hold only tensors, numbers, strings, NumPy arrays and dicts, lists, tuples, sets of them",
        fix="let state_dict() return plain values (a name, a number, a tensor), and rebuild the object in load_state_dict()",
    )


def from_plain(value: Any) -> Any:
    """What `to_plain` was given, with the same types (mappings other than OrderedDict as dict)."""
    if isinstance(value, Mapping):
        if _TAG in value:
            return _untag(value)
        items = ((key, from_plain(item)) for key, item in value.items())
        return OrderedDict(items) if isinstance(value, OrderedDict) else dict(items)
    if isinstance(value, list):
        return [from_plain(item) for item in value]
    if isinstance(value, tuple):
        return tuple(from_plain(item) for item in value)
    return value


def _untag(value: Mapping[str, Any]) -> Any:
    kind = value[_TAG]
    if kind == "ndarray":
        dtype = np.dtype(value["dtype"])
        return np.frombuffer(value["raw"].numpy().tobytes(), dtype=dtype).reshape(value["shape"]).copy()
    if kind == "scalar":
        return np.frombuffer(value["raw"], dtype=np.dtype(value["dtype"]))[0]
    if kind == "mapping":
        items = value["items"]
        return type(items)((key, from_plain(item)) for key, item in items.items())
    items = [from_plain(item) for item in value["items"]]
    if kind == "deque":
        return deque(items, maxlen=value["maxlen"])
    if kind in ("set", "frozenset"):
        return set(items) if kind == "set" else frozenset(items)
    raise CheckpointError(
        "AR604", f"a value of the unknown kind {kind!r}", why="written by a newer allranks?"
    )
