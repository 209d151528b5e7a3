"""Are a wrapped model's names looked up in a dictionary that has the bare ones, so that none is ever found?

    shadow = {n: p.clone() for n, p in model.named_parameters()}; model = DDP(model)
    for name, p in model.named_parameters():  # "module.0.weight"
        if name in shadow: ...                # "0.weight": never

`named_parameters` and `state_dict` of DDP and of compiled modules are marked. When one line calls them again, the source of its loop is
read: whether the name is tested against a dictionary just as it comes, and used for nothing else. If so, that dictionary is looked at:
tensors of the parameters' shapes under their bare names, and none under the names that the loop has. A few lines are looked at, a few
times each; then the marks are taken off. The script's objects are asked for nothing: only `vars()` and keys. No torch here.
"""

from __future__ import annotations

import ast
import functools
import linecache
import re
import sys
import warnings
from _thread import get_ident
from collections import OrderedDict
from collections.abc import Callable
from itertools import islice
from types import FrameType
from typing import Any

from allranks.record import compiling, notes, process

_writer, _lines = process.WRITER, process.LINES
KIND = "unmatched"
METHODS = ("named_parameters", "state_dict")
MAX_PLACES, MAX_CALLS, MAX_NAMES, MAX_SOURCE = 16, 4096, 4096, 5000
AT_CALLS = (2, 4, 16, 64)
"""A line is looked at when it has been called so often; a dictionary that is filled by the first call matches in the second."""
OPTIMIZED = 1  # CO_OPTIMIZED of a code: a function's, whose locals are copied when they are asked for
NOT_SHARED = 3
"""So many know the copy of a function's locals if only the frame and we do; one more is the script, which has called locals()."""
_PREFIX = re.compile(r"^(?:module\.|_orig_mod\.)+|(?<=\.)_orig_mod\.")

Chain = tuple[str, ...]
"""What an expression is called: ("self", "shadow")."""


class _Place:
    """A line that calls one of the methods."""

    __slots__ = ("calls", "tested")

    def __init__(self) -> None:
        self.calls = 0
        self.tested: list[Chain] | None = None  # not read yet


_places: dict[tuple[Any, int], _Place] = {}
_marked: list[tuple[Any, str, Any]] = []
_calls = 0


def mark(kind: Any) -> None:
    """A class of modules whose parameters have longer names than those of the module inside."""
    for name in METHODS:
        if name not in vars(kind):
            method = _marked_method(getattr(kind, name))
            setattr(kind, name, method)
            _marked.append((kind, name, method))


def _marked_method(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def marked(self: Any, *args: Any, **kwargs: Any) -> Any:
        global _calls
        _calls += 1
        if _calls >= MAX_CALLS:
            _stop()
        elif get_ident() == _writer.owner:
            _look(self, sys._getframe(1))
        return plain(self, *args, **kwargs)

    return compiling.let_dynamo_see(marked, plain)


def _stop() -> None:
    for kind, name, method in _marked:
        if vars(kind).get(name) is method:
            delattr(kind, name)
    _marked.clear()
    _places.clear()


def _look(model: Any, frame: FrameType) -> None:
    """A line of the script calls one of the methods. Never raises."""
    try:
        if frame.f_globals.get("__name__", "").startswith("torch."):
            return
        key = frame.f_code, frame.f_lineno
        place = _places.get(key)
        if place is None:
            if len(_places) < MAX_PLACES:
                place = _places[key] = _Place()
            else:
                return
        place.calls += 1
        if place.calls in AT_CALLS and place.tested != []:
            _look_at(model, frame, place)
    except Exception:  # noqa: BLE001 - a look is not worth the user's step
        _stop()


def _look_at(model: Any, frame: FrameType, place: _Place) -> None:
    if place.tested is None:
        lines = linecache.getlines(frame.f_code.co_filename, frame.f_globals)
        place.tested = looked_up_in("".join(lines), frame.f_lineno) if len(lines) < MAX_SOURCE else []
    for chain in place.tested:
        found = _value(frame, chain)
        if type(found) in (dict, OrderedDict) and (facts := compare(model, found)) is not None:
            notes.note(
                KIND,
                line=_writer.name_of(_lines.here() >> 8),
                what=".".join(chain),
                calls=place.calls,
                **facts,
            )
            _stop()
            return


def compare(model: Any, shadow: dict[Any, Any]) -> dict[str, Any] | None:
    """What is there if the names of `model` are not in `shadow`, and their bare forms are; None if it is otherwise."""
    named = dict(islice(sys.modules["torch"].nn.Module.named_parameters(model), MAX_NAMES))
    if not named or not shadow or any(name in shadow for name in named):
        return None
    bare = {_PREFIX.sub("", name): p for name, p in named.items()}
    both = [(key, bare[b]) for key in shadow if isinstance(key, str) and (b := _PREFIX.sub("", key)) in bare]
    if 2 * len(both) < len(shadow) or not all(_is_like(shadow[key], p) for key, p in both):
        return None
    return {"names": len(named), "keys": len(shadow), "first": next(iter(named)), "other": both[0][0]}


def _is_like(value: Any, parameter: Any) -> bool:
    return hasattr(value, "is_floating_point") and value.shape == parameter.shape


def _value(frame: FrameType, chain: Chain) -> Any:
    """What a name of the script, or an attribute of it, is; asked for without calling anything of the script's."""
    own = frame.f_locals
    found = own.get(chain[0], frame.f_globals.get(chain[0]))
    if frame.f_code.co_flags & OPTIMIZED and type(own) is dict and sys.getrefcount(own) <= NOT_SHARED:
        own.clear()  # a copy, which would keep all of it alive as long as the function runs (until Python 3.13)
    for name in chain[1:]:
        found = getattr(found, "__dict__", {}).get(name)
    return found


# --- the source ---


def looked_up_in(source: str, line: int) -> list[Chain]:
    """The dictionaries that the names of a loop are looked up in, where `line` calls one of the methods for that loop."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a backslash in a text, which Python has said already
        tree = ast.parse(source)
    scope = _scope(tree, line)
    calls = [n for n in ast.walk(scope) if isinstance(n, ast.Call) and _is_on(n, line) and _is_method(n.func)]
    names = {
        target.id
        for node in ast.walk(scope)
        if isinstance(node, ast.Assign) and any(call in ast.walk(node.value) for call in calls)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    found: list[Chain] = []
    for loop in ast.walk(scope):
        if isinstance(loop, ast.For) and any(
            part in calls or (isinstance(part, ast.Name) and part.id in names) for part in ast.walk(loop.iter)
        ):
            found += _looked_up(loop)
    return list(dict.fromkeys(found))


def _scope(tree: ast.Module, line: int) -> ast.AST:
    """The innermost function around a line."""
    inside = [
        n
        for n in ast.walk(tree)
        if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)) and _is_on(n, line)
    ]
    return max(inside, key=lambda n: n.lineno, default=tree)


def _is_on(node: Any, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)


def _is_method(function: ast.expr) -> bool:
    return isinstance(function, ast.Attribute) and function.attr in METHODS


def _looked_up(loop: ast.For) -> list[Chain]:
    """What `name in shadow` and `shadow.get(name)` of a loop look into; nothing if the name is used otherwise than as a key."""
    target = loop.target.elts[0] if isinstance(loop.target, ast.Tuple) else loop.target
    if not isinstance(target, ast.Name):
        return []
    found, used = [], 0
    for node in (part for statement in loop.body for part in ast.walk(statement)):
        used += isinstance(node, ast.Name) and node.id == target.id
        key, into = _key_of(node)
        if isinstance(key, ast.Name) and key.id == target.id:
            used -= 1
            found += [chain] if (chain := _chain(into)) and not isinstance(node, ast.Subscript) else []
    return found if not used else []


def _key_of(node: ast.AST) -> tuple[Any, Any]:
    """(key, what it is looked up in), if that is what an expression does."""
    if isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.In, ast.NotIn)):
        return node.left, node.comparators[0]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get":
        return (node.args or [None])[0], node.func.value
    return (node.slice, node.value) if isinstance(node, ast.Subscript) else (None, None)


def _chain(node: ast.expr) -> Chain:
    """Of `self.shadow`; empty if it is another expression."""
    if isinstance(node, ast.Name):
        return (node.id,)
    before = _chain(node.value) if isinstance(node, ast.Attribute) else ()
    return (*before, node.attr) if before and isinstance(node, ast.Attribute) else ()


def _after_fork() -> None:
    global _calls
    _calls = 0
    _places.clear()


process.AFTER_FORK.append(_after_fork)
