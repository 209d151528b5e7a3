"""Does torch.compile do with a marked method what it does with the method?"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from allranks.record import compiling

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch's own import of its compiler


def marked(method: Callable[..., Any]) -> Callable[..., Any]:
    """As windows.py and unmatched.py mark."""

    @functools.wraps(method)
    def mark(self: Any, *args: Any, **kwargs: Any) -> Any:
        called.append(method.__name__)
        return method(self, *args, **kwargs)

    return compiling.let_dynamo_see(mark, method)


called: list[str] = []


class Net(nn.Module):
    """Methods with defaults, and one that torch never traces, as Optimizer.zero_grad is."""

    @marked
    def add(self, x: torch.Tensor, one: int = 1, *, more: int = 1) -> torch.Tensor:
        return x + one + more

    @marked
    @torch._disable_dynamo
    def untraced(self, one: int = 1) -> int:
        return one


@pytest.mark.parametrize("given", [{}, {"more": 2}])
def test_compile_when_a_marked_method_has_defaults_then_traced_with_them(given: dict[str, int]) -> None:
    net = Net()
    called.clear()
    compiled = torch.compile(lambda x: net.add(x, **given), backend="eager", fullgraph=True)
    assert compiled(torch.zeros(1)).item() == 2 + bool(given) and called == []
    assert net.add(torch.zeros(1), **given).item() == 2 + bool(given) and called == ["add"]


def test_compile_when_torch_never_traces_the_method_then_the_mark_is_called_as_a_method() -> None:
    net = Net()
    called.clear()
    compiled = torch.compile(lambda x: x + net.untraced(), backend="eager")
    assert compiled(torch.zeros(1)).item() == 1 and called == ["untraced"]
