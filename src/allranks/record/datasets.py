"""Is this the data set that the other ranks have? What it holds, as far as its attributes tell, in a few numbers.

Only `vars()` is looked at: nothing of the user's is called, no sample is read. Two data sets of the same class whose attributes are equal
are taken for the same; where nothing telling is found (a data set that makes its samples), `is_telling` is False and nothing is
concluded. No torch here.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from pathlib import PurePath
from typing import Any

from allranks.record.lines import USER, kind_of
from allranks.record.lines import describe as place_in

MAX_PARTS = 24
MAX_DEPTH = 3
MAX_ITEMS = 20_000
_ENDS = 64  # elements at either end of an array that are looked at
_MASK = (1 << 52) - 1  # JSON's numbers are exact up to 2**53
_PLAIN = (bool, int, float, str, bytes, PurePath)


def describe(dataset: Any) -> dict[str, Any]:
    """Class, length, hash, and the parts: [path, items, hash in order, hash in any order, the first items, of texts a sketch]."""
    parts: list[list[Any]] = []
    _walk("", dataset, 0, parts, is_data=True)
    text = repr([(p[0], p[1], p[2]) for p in parts])
    return {
        "class": type(dataset).__name__,
        "code": code_of(dataset),
        "length": length_of(dataset),
        "hash": _hash(text),
        "is_telling": any(p[1] >= 0 for p in parts),
        "parts": parts,
    }


def code_of(dataset: Any) -> str:
    """Where the class says how a sample is read, "file:line function"; "" if that is not the user's."""
    for name in ("__getitem__", "__iter__"):
        code = getattr(getattr(type(dataset), name, None), "__code__", None)
        if code is not None and kind_of(code.co_filename) == USER:
            return place_in(code, code.co_firstlineno)
    return ""


def length_of(dataset: Any) -> int:
    """Its length, -1 if it has none."""
    try:
        return len(dataset)
    except Exception:  # noqa: BLE001 - the user's __len__
        return -1


def base_of(dataset: Any) -> tuple[Any, tuple[int, ...] | None]:
    """What lies below Subsets, and which of its samples they choose; None: all, or not known."""
    indices: Any = None
    for _ in range(8):
        inner, chosen = getattr(dataset, "dataset", None), getattr(dataset, "indices", None)
        if inner is None or chosen is None or type(dataset).__name__ != "Subset":
            break
        if len(chosen) > 200_000:
            return dataset, None
        chosen = [int(i) for i in chosen]
        indices = chosen if indices is None else [chosen[i] for i in indices]
        dataset = inner
    return dataset, None if indices is None else tuple(indices)


def _walk(path: str, value: Any, depth: int, parts: list[list[Any]], *, is_data: bool = False) -> None:
    if len(parts) >= MAX_PARTS or depth > MAX_DEPTH:
        return
    if value is None or isinstance(value, _PLAIN):
        is_place = isinstance(value, (str, PurePath)) and len(str(value)) > 0
        parts.append([path, 1 if is_place else -1, _hash(repr(value)), 0, [repr(value)[:80]]])
    elif isinstance(value, (list, tuple, range)):
        _walk_list(path, value, depth, parts)
    elif isinstance(value, dict):
        for key in list(value)[:MAX_PARTS]:
            _walk(f"{path}[{key!r}]", value[key], depth + 1, parts)
    elif hasattr(value, "dtype") and hasattr(value, "shape"):
        parts.append(
            [
                path,
                max(1, _items(value.shape)),
                _hash(_ends(value)),
                0,
                [f"{list(value.shape)} {value.dtype}"],
            ]
        )
    elif is_data or hasattr(value, "__getitem__") or hasattr(type(value), "__iter__"):
        for name, inner in list(getattr(value, "__dict__", {}).items()):
            _walk(f"{path}.{name}".lstrip("."), inner, depth + 1, parts)


def _walk_list(path: str, value: Any, depth: int, parts: list[list[Any]]) -> None:
    items = list(value[:MAX_ITEMS])
    if items and not all(isinstance(i, _PLAIN) or _is_plain_tuple(i) for i in items):
        for place, inner in enumerate(items[:8]):
            _walk(f"{path}[{place}]", inner, depth + 1, parts)
        return
    texts = [repr(i) for i in items]
    sketch = (
        sorted({zlib.crc32(t.encode()) for t in texts})[:_ENDS]
        if isinstance(items[0] if items else 0, str)
        else []
    )
    any_order = sum(zlib.crc32(t.encode()) * 2654435761 for t in texts) & _MASK
    parts.append([path, len(value), _hash("|".join(texts)), any_order, [t[:80] for t in texts[:4]], sketch])


def _is_plain_tuple(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) <= 8 and all(isinstance(v, _PLAIN) for v in value)


def _items(shape: Iterable[int]) -> int:
    count = 1
    for size in shape:
        count *= int(size)
    return count


def _ends(array: Any) -> str:
    """The first and the last elements of a tensor or numpy array, as text."""
    flat = array.detach().reshape(-1) if hasattr(array, "detach") else array.reshape(-1)
    if getattr(flat, "is_cpu", True) is False:
        return f"{list(array.shape)} {array.dtype}"
    return f"{list(array.shape)} {array.dtype} {flat[:_ENDS].tolist()} {flat[-_ENDS:].tolist()}"


def _hash(text: str) -> int:
    raw = text.encode("utf-8", "replace")
    return (zlib.crc32(raw) << 20 ^ zlib.adler32(raw)) & _MASK
