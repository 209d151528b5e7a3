"""With which of torch's implementations does an optimizer step? The one with the same bits and fewer calls, or the one the user asks for.

torch steps on a CPU one parameter after the other, a dozen calls each; its foreach form makes the same additions and products in the
same order with a dozen calls in all (tests/unit/test_kernels.py compares the bits). Of 16-bit weights it rounds products differently, so
those step as ever. fused is quicker still, and rounds differently in the last bit, so it is only taken when asked for. What the user said
when making the optimizer stays.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from allranks.core.errors import UsageError

SAME_BITS = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
MAX_BYTES = 64 << 20  # foreach keeps temporaries of all parameters at once; and large ones do not need it
_SAME_BITS_DTYPES = (torch.float32, torch.float64)
_ODD = ("fused", "capturable", "differentiable")


def choose(optimizer: torch.optim.Optimizer) -> bool:
    """Let a small model's optimizer on a CPU step with foreach, where the user left that open; whether it does."""
    if type(optimizer) not in SAME_BITS:
        return False
    groups: list[dict[str, Any]] = optimizer.param_groups
    if any(g.get("foreach") is not None or any(g.get(name) for name in _ODD) for g in groups):
        return False
    parameters = [p for g in groups for p in g["params"]]
    if not all(_is_plain(p) for p in parameters):
        return False
    if sum(p.numel() * p.element_size() for p in parameters) > MAX_BYTES:
        return False
    for group in groups:
        group["foreach"] = True
    return True


def _is_plain(p: torch.Tensor) -> bool:
    is_sparse = p.grad is not None and p.grad.layout is not torch.strided
    is_known = type(p) in (nn.Parameter, torch.Tensor) and p.dtype in _SAME_BITS_DTYPES
    return is_known and p.is_cpu and not is_sparse


def use_fused(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer that has not stepped yet use torch's fused kernel.

    Raises:
        UsageError: AR105 its class has none, or it has stepped already.
    """
    if "fused" not in optimizer.defaults:
        raise UsageError(
            "AR105",
            f"fused=True, but {type(optimizer).__name__} has no fused form",
            fix="leave fused out, or take SGD, Adam or AdamW",
        )
    if optimizer.state:
        raise UsageError(
            "AR105",
            f"fused=True for a {type(optimizer).__name__} that has stepped already",
            why="the fused form keeps its state in another way from the first step on",
            fix="give it to run.optimizer before its first step",
        )
    settings = {**optimizer.defaults, "fused": True, "foreach": False}
    # The constructor looks whether devices and dtypes can be fused, and sets what GradScaler asks for.
    kind: Any = type(optimizer)
    made = kind(
        [{**g, "fused": True, "foreach": False} for g in optimizer.param_groups], **_known(kind, settings)
    )
    optimizer.defaults = made.defaults
    for group, new in zip(optimizer.param_groups, made.param_groups, strict=True):
        group.update({key: new[key] for key in ("fused", "foreach") if key in new})
    for name in ("_step_supports_amp_scaling", "_need_device_dtype_check_for_fused"):
        if hasattr(made, name):
            setattr(optimizer, name, getattr(made, name))


def _known(kind: Any, settings: dict[str, Any]) -> dict[str, Any]:
    names = inspect.signature(kind.__init__).parameters
    return {key: value for key, value in settings.items() if key in names}


def with_present_form(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """A state to load whose groups step in the form that the optimizer has now.

    torch's load_state_dict takes the groups' options from the state: a fused optimizer would no longer be fused, and what we chose in
    one run would pass for what the user says in the next.
    """
    groups = [
        {**theirs, **{key: ours[key] for key in ("foreach", "fused") if key in ours}}
        for theirs, ours in zip(state["param_groups"], optimizer.param_groups, strict=True)
    ]
    return {**state, "param_groups": groups}


def forget_gradients(optimizer: torch.optim.Optimizer) -> None:
    """optimizer.zero_grad(set_to_none=True), without the profiler's frame around it, unless the class has its own."""
    if type(optimizer).zero_grad is not torch.optim.Optimizer.zero_grad or "zero_grad" in vars(optimizer):
        optimizer.zero_grad(set_to_none=True)
        return
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = None
