"""Is this the data set that the other ranks have? What it holds, as far as its attributes tell, in a few numbers.

Only `vars()` is looked at: no sample is read, nothing of the user's but `__len__` is called, and of what is large only its ends and a
few places between are read, without a copy. Two data sets of the same class whose attributes are equal are taken for the same; where
nothing telling is found (a data set that makes its samples), `is_telling` is False and nothing is concluded. No torch here.
"""

from __future__ import annotations

import zlib
from itertools import islice
from pathlib import PurePath
from typing import Any

from allranks.record.lines import USER, kind_of
from allranks.record.lines import describe as place_in

MAX_PARTS = 24
MAX_DEPTH = 3
MAX_ITEMS = 20_000
MAX_TEXT = 240
"""Of one text: longer ones are known by their length, and by pieces that are this long together."""
_ENDS = 64  # elements at either end of an array that are looked at
_MASK = (1 << 52) - 1  # JSON's numbers are exact up to 2**53
PLAIN = (bool, int, float, str, bytes, PurePath)


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


def text_of(value: Any) -> str:
    """A plain value, or a tuple of them, as a text that is never long and tells different values apart; else its type."""
    if isinstance(value, (str, bytes)):
        kind: Any = str if isinstance(value, str) else bytes
        return _short(kind, value)
    if isinstance(value, bool) or value is None:
        return repr(value)
    if isinstance(value, int):  # not the repr of a subclass: numpy's and the user's
        return int.__repr__(value) if value.bit_length() < 512 else hex(hash(value))
    if isinstance(value, float):
        return float.__repr__(value)
    if isinstance(value, complex):
        return complex.__repr__(value)
    if isinstance(value, PurePath):
        return _short(str, str(value))
    if isinstance(value, tuple) and len(value) <= 8:
        return f"({', '.join(text_of(v) for v in value)})"
    return type(value).__qualname__


def _short(kind: Any, value: Any) -> str:
    length = kind.__len__(value)
    if length <= MAX_TEXT:
        return kind.__repr__(value)
    piece = MAX_TEXT // 6
    places = [(length - piece) * n // 5 for n in range(6)]
    return f"{length}:" + "".join(repr(kind.__getitem__(value, slice(at, at + piece))) for at in places)


def _walk(path: str, value: Any, depth: int, parts: list[list[Any]], *, is_data: bool = False) -> None:
    if len(parts) >= MAX_PARTS or depth > MAX_DEPTH:
        return
    if value is None or isinstance(value, PLAIN):
        text = text_of(value)
        is_place = isinstance(value, (str, PurePath)) and text not in ("''", "'.'")
        parts.append([path, 1 if is_place else -1, _hash(text), 0, [text[:80]]])
    elif isinstance(value, (list, tuple, range)):
        _walk_list(path, value, depth, parts)
    elif isinstance(value, dict):
        for key, inner in list(islice(dict.items(value), MAX_PARTS)):
            _walk(f"{path}[{text_of(key)[:80]}]", inner, depth + 1, parts)
    elif (kind := _array_kind(value)) and not (is_data and kind == "other"):
        parts.append([path, *_describe_array(value, kind)])
    elif is_data or hasattr(type(value), "__getitem__") or hasattr(type(value), "__iter__"):
        for name, inner in list(islice(getattr(value, "__dict__", {}).items(), MAX_ITEMS)):
            _walk(f"{path}.{name}".lstrip("."), inner, depth + 1, parts)


def _walk_list(path: str, value: Any, depth: int, parts: list[list[Any]]) -> None:
    kind: Any = next(kind for kind in (list, tuple, range) if isinstance(value, kind))
    items = list(kind.__getitem__(value, slice(MAX_ITEMS)))
    if items and not all(isinstance(i, PLAIN) or _is_plain_tuple(i) for i in items):
        for place, inner in enumerate(items[:8]):
            _walk(f"{path}[{place}]", inner, depth + 1, parts)
        return
    in_order, any_order, sketch = (0, 1), 0, set()
    for item in items:
        raw = text_of(item).encode("utf-8", "replace")
        one = zlib.crc32(raw)
        in_order = zlib.crc32(b"|" + raw, in_order[0]), zlib.adler32(b"|" + raw, in_order[1])
        any_order += one * 2654435761
        if isinstance(item, str):
            sketch.add(one)
    first = [text_of(i)[:80] for i in items[:4]]
    ordered = (in_order[0] << 20 ^ in_order[1]) & _MASK
    parts.append([path, kind.__len__(value), ordered, any_order & _MASK, first, sorted(sketch)[:_ENDS]])


def _is_plain_tuple(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) <= 8 and all(isinstance(v, PLAIN) for v in value)


def _array_kind(value: Any) -> str:
    """Whose array it is; "other": of a library whose arrays may read a file when they are touched."""
    kinds = type(value).__mro__
    for kind in kinds:
        if kind.__module__ in ("torch", "numpy") and kind.__name__ in ("Tensor", "ndarray"):
            return kind.__module__
    is_array = all(any(name in vars(kind) for kind in kinds) for name in ("dtype", "shape"))
    return "other" if is_array else ""


def _describe_array(array: Any, kind: str) -> list[Any]:
    """Items, hash, and the shape in words; its items are not known (-1) where its ends cannot be looked at."""
    try:
        count, what = 1, f"{list(array.shape)} {array.dtype}"
        for size in array.shape:
            count *= int(size)
        if kind == "other":
            return [-1, _hash(what), 0, [what]]
        return [max(1, count), _hash(f"{what} {_ends(array, kind)}"), 0, [what]]
    except Exception:  # noqa: BLE001 - an array of a kind that is not known here: sparse, quantized, of a closed file
        return [-1, 0, 0, [type(array).__name__]]


def _ends(array: Any, kind: str) -> str:
    """The first and the last elements of a tensor or numpy array, as text; never a copy of the whole."""
    if kind == "numpy":
        flat = array.flat
        ends = flat[:_ENDS], flat[-_ENDS:] if array.size > _ENDS else flat[:]
    else:
        tensor = array.detach()
        if not tensor.is_cpu:
            return ""
        first = last = tensor.view(-1) if tensor.is_contiguous() else tensor
        while first.dim() > 1:
            first, last = first[0], last[-1]
        ends = first[:_ENDS], last[-_ENDS:]
    return " ".join(text_of(item) for end in ends for item in end.tolist())


def _hash(text: str) -> int:
    raw = text.encode("utf-8", "replace")
    return (zlib.crc32(raw) << 20 ^ zlib.adler32(raw)) & _MASK
