"""In which precision does a forward compute? float32, or autocast to bfloat16 or float16 around float32 weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from allranks.core.errors import UsageError

_DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """One choice of precision: the autocast of the forwards and, for fp16, the scaler of the losses.

    bf16 costs about three decimal digits in activations and nothing in range. fp16 has a small range, so losses are scaled up and
    an update whose gradients overflow is skipped, by all ranks.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        if name not in _DTYPES:
            raise UsageError("AR104", f"precision={name!r}", fix="precision='fp32', 'bf16' or 'fp16'")
        if name == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported():
            raise UsageError(
                "AR104",
                f"precision='bf16', but {torch.cuda.get_device_name(device)} has no bfloat16",
                fix="precision='fp16'",
            )
        self.name, self.device, self.dtype = name, device, _DTYPES[name]
        self.scaler = torch.amp.GradScaler(device.type) if name == "fp16" else None

    def autocast(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call under autocast; floating outputs come back as float32, so that the loss is not computed in half precision."""
        with torch.autocast(self.device.type, self.dtype):
            return to_float32(call(*args, **kwargs))


def to_float32(value: Any) -> Any:
    """Half-precision tensors in any nesting of tuples, lists and dicts as float32; everything else as it is."""
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(to_float32(v) for v in value))
    if isinstance(value, (tuple, list)):
        return type(value)(to_float32(v) for v in value)
    if isinstance(value, dict):
        kind: Any = type(value)
        try:
            return kind((k, to_float32(v)) for k, v in value.items())
        except TypeError:  # an output class of its own that does not take pairs: convert in place
            for k, v in value.items():
                value[k] = to_float32(v)
    return value


def agree_on_inf(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, world_size: int) -> bool:
    """Whether some rank's gradients overflowed; makes every rank skip the update if one rank's gradients overflowed. Collective.

    After DDP's all-reduce the gradients are equal, so the checks agree already; gradients that were not reduced by DDP (a parameter
    left out, a gradient changed by hand on one rank) would let one rank skip alone, and then the replicas differ for good.
    """
    found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    if world_size > 1:
        for value in found.values():
            dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return any(bool(value) for value in found.values())


def use_tf32(enabled: bool) -> None:
    """Let float32 matrix products and convolutions on Ampere and newer GPUs keep 10 of 23 mantissa bits, for up to 8 x the speed."""
    torch.set_float32_matmul_precision("high" if enabled else "highest")
    if torch.backends.cudnn.is_available():
        torch.backends.cudnn.allow_tf32 = enabled


def use_deterministic(enabled: bool) -> None:
    """Choose only algorithms that give the same bits every time; on GPUs slower, and some operations then raise an error.

    cuBLAS also needs CUBLAS_WORKSPACE_CONFIG=:4096:8 in the environment before the first CUDA call; torch's error says so.
    """
    torch.use_deterministic_algorithms(enabled)
    if torch.backends.cudnn.is_available():
        torch.backends.cudnn.benchmark = False


def scale_all(tensors: list[torch.Tensor], factor: float) -> None:
    """Multiply all in place, in one call: torch's optimizers are built on the same operations, which have no public name."""
    if tensors:
        torch._foreach_mul_(tensors, factor)  # pyright: ignore[reportPrivateImportUsage]


def blend_all(into: list[torch.Tensor], values: list[torch.Tensor], weight: float) -> None:
    """into += weight * (values - into) for all, in place, in one call."""
    torch._foreach_lerp_(into, values, weight)  # pyright: ignore[reportPrivateImportUsage]
