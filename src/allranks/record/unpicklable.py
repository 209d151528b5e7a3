"""Where in an object is what can be neither copied nor pickled? An exception names its type only, not the attribute.

Looked for once, when such an exception ends the process: in the object that was given to copy.deepcopy or torch.save, which its
traceback still holds. Attributes are read from `__dict__`, so nothing of the user's is called. Pickle's own frames are in C: where it was
called directly, the object is not known.
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Iterator
from typing import Any

MOST = 50_000
"""Values that are looked at."""
_CANNOT = re.compile(r"cannot pickle '?([\w.<>]+)'? object")
_GIVEN = {("copy", "deepcopy"): "x", ("serialization", "save"): "obj"}
"""The functions whose argument is looked through: module, name -> the argument's name."""
_HOLDERS = ("_modules", "_parameters", "_buffers")  # of a torch module: what is in them goes by its own name


def path_in(error: BaseException) -> str:
    """As in "Model.body.1.group"; empty if the exception is another, or the object is not found."""
    found = _CANNOT.search(str(error)) if isinstance(error, TypeError) else None
    root = _given(error) if found else None
    if found is None or root is None:
        return ""
    wanted = found.group(1).rsplit(".", 1)[-1]
    return next((path for path, value in _inside(root) if type(value).__name__ == wanted), "")


def _given(error: BaseException) -> Any:
    traceback = error.__traceback__
    while traceback is not None:
        frame, traceback = traceback.tb_frame, traceback.tb_next
        code = frame.f_code
        module = os.path.basename(code.co_filename).removesuffix(".py")  # noqa: PTH119 - see process.py
        if (name := _GIVEN.get((module, code.co_name))) is not None:
            return frame.f_locals.get(name)
    return None


def _inside(root: Any) -> Iterator[tuple[str, Any]]:
    """All that is in `root`, with its path: what is nearest first, each value once."""
    seen, waiting = {id(root)}, deque([(type(root).__name__, root)])
    while waiting and len(seen) < MOST:
        path, value = waiting.popleft()
        yield path, value
        for step, inner in _parts(value):
            if id(inner) not in seen:
                seen.add(id(inner))
                waiting.append((path + step, inner))


def _parts(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [
            (f"[{key!r}]" if type(key) in (str, int) else "[...]", v) for key, v in list(dict.items(value))
        ]
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):  # a class of the user's may have its own __iter__
            iterate: Any = kind.__iter__
            return [(f"[{number}]", v) for number, v in enumerate(iterate(value))]
    try:
        own = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return []
    if not isinstance(own, dict) or isinstance(value, type):
        return []
    parts = []
    for name, inner in list(own.items()):
        held = inner if name in _HOLDERS and isinstance(inner, dict) else {name: inner}
        parts += [(f".{key}", v) for key, v in held.items()]
    return parts
