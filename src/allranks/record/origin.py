"""Where did a loss that is not finite begin? Asked once, when it is seen, before its backward: its graph is still whole.

    the inputs of DDP's forward -> its parameters -> its output -> the first node of the graph, from the inputs on, that kept such a value

Nothing is computed again, and nothing is kept for it but weak references to the last inputs and output. Tensors that a graph has kept
are not asked for where a checkpoint would compute them anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import ref as _ref

MAX_NODES = 4000
MAX_NUMEL = 1 << 24
_RESULTS = ("_saved_result", "_saved_out", "_saved_output")
_PLACES = {
    "_saved_self": 0,
    "_saved_input": 0,
    "_saved_other": 1,
}  # of an input that was kept among the inputs
_last: tuple[Any, ...] = ()  # weak references: the DDP, its first input, its output
wants_rows = True
"""Whether somebody still asks for `rows`."""
rows = 0
"""Samples in the last forward, by the first dimension of its first tensor; 0 = not known."""


def remember(ddp: Any, inputs: tuple[Any, ...], result: Any) -> None:
    """The last forward of a DDP, weakly: 0.5 us. Never raises."""
    global _last
    if wants_rows:
        _count_rows(inputs, result)
    try:
        _last = _ref(ddp), _ref(inputs[0]), _ref(result)
    except (IndexError, TypeError):  # no tensors: a dict, named inputs, several outputs
        _last = _ref(ddp), _found_in(inputs), _found_in(result)


def _count_rows(inputs: tuple[Any, ...], result: Any) -> None:
    """Of the result where the inputs were given by name."""
    global rows
    try:
        found = _first_shape(inputs) or _first_shape(result)
        rows = int(found[0]) if found else 0
    except Exception:  # noqa: BLE001 - the user's own containers
        rows = 0


def _first_shape(values: Any) -> Any:
    """That of the first tensor with a dimension; None if there is none near."""
    if hasattr(values, "is_floating_point"):
        return values.shape or None
    if isinstance(values, dict):
        values = list(values.values())
    some = values[:8] if isinstance(values, (list, tuple)) else ()
    return next((found for value in some if (found := _first_shape(value))), None)


def _found_in(values: Any) -> Any:
    try:
        return _tensor_in(values)
    except Exception:  # noqa: BLE001 - the user's own containers
        return None


def _tensor_in(values: Any) -> Any:
    """A weak reference to the first tensor of a nested value, if there is one."""
    for value in (
        list(values.values())[:8]
        if isinstance(values, dict)
        else values[:8]
        if isinstance(values, (list, tuple))
        else [values]
    ):
        if hasattr(value, "is_floating_point"):
            return _ref(value)
        if isinstance(value, (dict, list, tuple)) and (found := _tensor_in(value)) is not None:
            return found
    return None


def find(loss: Any) -> dict[str, Any]:
    """What is known of the origin: {} if nothing is. Never raises."""
    try:
        return _find(loss)
    except Exception:  # noqa: BLE001 - the loss is nan already; nothing may become worse
        return {}


def _find(loss: Any) -> dict[str, Any]:
    ddp, given, output = (ref() if ref is not None else None for ref in _last or (None, None, None))
    if given is not None and hasattr(given, "is_floating_point") and _is_bad(given):
        return {"place": "input", "rows": _bad_rows(given), "of": int(given.shape[0]) if given.dim() else 1}
    named = list(ddp.module.named_parameters()) if ddp is not None else []
    bad = [n for n, p in named if _is_bad(p)]
    if bad:
        return {"place": "parameter", "name": bad[0], "count": len(bad)}
    found: dict[str, Any] = {}
    if output is not None and hasattr(output, "is_floating_point"):
        found["place"] = "forward" if _is_bad(output) else "loss"
    return found | _in_graph(loss.grad_fn, {id(p): n for n, p in named})


def _in_graph(root: Any, names: dict[int, str]) -> dict[str, Any]:
    """The node nearest to the inputs that kept a value that is not finite: the operation that made it, and the parameter before it."""
    nodes = _ordered(root)
    if any("Checkpoint" in type(n).__name__ or "NoopSaveInputs" in type(n).__name__ for n in nodes):
        return {}
    for node in nodes:
        for name, tensor in _kept(node):
            if _is_bad(tensor):
                made_by = node if name in _RESULTS else _maker(node, name)
                if made_by is None:
                    return {"operation": f"a value that {_name_of(node)} was given from outside the model"}
                return {"operation": _name_of(made_by), "after": _parameter_below(made_by, names)}
    return {}


def _ordered(root: Any) -> list[Any]:
    """The nodes of a graph, those nearest to the inputs first."""
    found: list[Any] = []
    seen: set[Any] = set()
    stack: list[tuple[Any, bool]] = [(root, False)] if root is not None else []
    while stack and len(seen) < MAX_NODES:
        node, is_done = stack.pop()
        if is_done:
            found.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [
                (before, False)
                for before, _ in node.next_functions
                if before is not None and before not in seen
            ]
    return found


def _kept(node: Any) -> Iterator[tuple[str, Any]]:
    for name in dir(node):
        if name.startswith("_saved_"):
            value = getattr(node, name)
            if hasattr(value, "is_floating_point"):
                yield name, value


def _maker(node: Any, name: str) -> Any:
    """What made an input that a node kept; None: no part of the graph did."""
    before = [maker for maker, _ in node.next_functions]
    place = _PLACES.get(name, 0)
    return before[place] if place < len(before) else next((b for b in before if b is not None), None)


def _name_of(node: Any) -> str:
    return type(node).__name__.removesuffix("0").removesuffix("Backward").lower()


def _parameter_below(node: Any, names: dict[int, str]) -> str:
    """The nearest parameter that went into a node, by name."""
    level, seen = [node], set()
    for _ in range(64):
        below = []
        for one in level:
            variable = getattr(one, "variable", None)
            if variable is not None and id(variable) in names:
                return names[id(variable)]
            below += [b for b, _ in one.next_functions if b is not None and b not in seen]
            seen.update(below)
        level = below[:64]
    return ""


def _is_bad(tensor: Any) -> bool:
    if (
        not tensor.is_floating_point()
        or not tensor.is_cpu
        or tensor.numel() > MAX_NUMEL
        or not tensor.numel()
    ):
        return False
    value = tensor.detach().sum(dtype=None).item()
    return value - value != 0 and not bool(tensor.detach().isfinite().all())


def _bad_rows(tensor: Any) -> list[int]:
    """Which samples of a batch hold such a value."""
    if not tensor.dim():
        return [0]
    flat = tensor.detach().reshape(tensor.shape[0], -1)
    return [i for i, bad in enumerate((~flat.isfinite()).any(1).tolist()) if bad][:8]
