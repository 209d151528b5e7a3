"""What does torch.compile see of the marks? Nothing: it traces what they mark. The private names of dynamo, each with a fallback."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

from allranks.record.compat import step_aside

_compiled: list[tuple[Callable[..., Any], Callable[..., Any]]] = []


def let_dynamo_see(marked: Callable[..., Any], instead: Callable[..., Any]) -> Callable[..., Any]:
    """`marked`, for which torch.compile traces `instead`. If a torch did not know this name, it would trace `marked`:
    slower (a graph break), not wrong."""
    if getattr(instead, "__globals__", {}).get("__name__") == "torch._compile":
        # One that torch never traces (Optimizer.zero_grad): called in its mark's place, a method would not get its `self`.
        marked._torchdynamo_disable = True  # type: ignore[attr-defined]
    elif isinstance(marked, FunctionType):
        marked._torchdynamo_inline = instead  # type: ignore[attr-defined]
        if isinstance(instead, FunctionType):  # dynamo looks for the defaults of what it traces in the mark
            marked.__defaults__, marked.__kwdefaults__ = instead.__defaults__, instead.__kwdefaults__
    else:
        _compiled.append((marked, instead))
    return marked


def substitute_compiled(dynamo: ModuleType) -> None:
    """torch._dynamo was imported: what it is to trace for functions that are no Python functions. Without it, a graph break."""
    substitute = getattr(dynamo, "substitute_in_graph", None)
    if substitute is None:
        step_aside("what torch.compile must not look into")
        return
    for marked, instead in _compiled:
        substitute(marked, skip_signature_check=True)(instead)


def hide_from_dynamo(eval_frame: ModuleType) -> None:
    """Have torch.compile run the record's own functions as they are, when it comes upon them outside of a graph.

    Else it would try to compile them one by one, and warn that it cannot trace a clock.
    """
    skip_code = getattr(eval_frame, "skip_code", None)
    if skip_code is None:
        step_aside("what torch.compile must not look into")
        return
    for name, module in list(sys.modules.items()):
        if name.startswith("allranks.record"):
            for code in _codes(module):
                skip_code(code)


def _codes(module: ModuleType) -> Iterator[CodeType]:
    """The code of all functions and methods of a module, nested ones too."""
    found = list(vars(module).values())
    found += [value for kind in found if isinstance(kind, type) for value in vars(kind).values()]
    codes = [f.__code__ for f in found if isinstance(f, FunctionType)]
    while codes:
        code = codes.pop()
        yield code
        codes += [const for const in code.co_consts if isinstance(const, CodeType)]
