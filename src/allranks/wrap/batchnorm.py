"""How does batch norm see the whole global micro-batch? Statistics over all ranks, weighted by their samples.

On CUDA this is torch's SyncBatchNorm, which has no CPU kernels; on a CPU it is GlobalBatchNorm below, in the same arithmetic as
one device's batch norm over the concatenated batch. A stand-in batch (a rank without a sample) counts nothing.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm  # the public BatchNorm1d/2d/3d have no public base


def convert_batchnorm(module: nn.Module, window: Any, device: torch.device) -> nn.Module:
    """Replace every BatchNorm layer, keeping its parameters, statistics and names."""
    if device.type == "cuda":
        return nn.SyncBatchNorm.convert_sync_batchnorm(module)
    if isinstance(module, _BatchNorm) and not isinstance(module, GlobalBatchNorm):
        return GlobalBatchNorm(module, window)
    for name, child in module.named_children():
        setattr(module, name, convert_batchnorm(child, window, device))
    return module


class GlobalBatchNorm(_BatchNorm):
    """BatchNorm over the samples of all ranks. Its forward and backward in training are **collective**."""

    def __init__(self, source: _BatchNorm, window: Any) -> None:
        super().__init__(
            source.num_features, source.eps, source.momentum, source.affine, source.track_running_stats
        )
        self._parameters.update(source._parameters)
        self._buffers.update(source._buffers)
        self.training = source.training
        object.__setattr__(self, "_window", window)

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise `input` (micro_batch, num_features, ...) with the statistics of all ranks' micro-batches."""
        window: Any = self._window
        if not self.training or window.local or not torch.is_grad_enabled() or not dist.is_initialized():
            return super().forward(input)
        self._check_input_dim(input)
        counts = window.num_samples != 0
        output, mean, var, count = _GlobalNorm.apply(input, self.weight, self.bias, self.eps, counts)
        if self.track_running_stats and self.running_mean is not None and self.running_var is not None:
            self._track(mean, var, count)
        return output

    def _track(self, mean: torch.Tensor, var: torch.Tensor, count: torch.Tensor) -> None:
        assert (
            self.num_batches_tracked is not None
            and self.running_mean is not None
            and self.running_var is not None
        )
        with torch.no_grad():
            self.num_batches_tracked.add_(1)
            factor = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
            unbiased = var * (count / (count - 1).clamp_min(1))
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), factor)


class _GlobalNorm(torch.autograd.Function):
    """y = (x - mean) / sqrt(var + eps) * weight + bias, with mean and var over all ranks; sums are kept in float64."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Any, bias: Any, eps: float, counts: bool) -> Any:
        dims = [0, *range(2, x.dim())]
        shape = [1, -1] + [1] * (x.dim() - 2)
        wide = x.detach().double()
        num_features = x.shape[1]
        sums = torch.zeros(2 * num_features + 1, dtype=torch.float64)
        if counts:
            sums[:num_features] = wide.sum(dims)
            sums[num_features:-1] = wide.square().sum(dims)
            sums[-1] = x.numel() / num_features
        dist.all_reduce(sums)
        count = sums[-1]
        if count <= 1:
            raise ValueError(
                f"Expected more than 1 value per channel when training, got {int(count)} over all ranks"
            )
        mean = sums[:num_features] / count
        var = (sums[num_features:-1] / count - mean.square()).clamp_min(0)
        rstd = (var + eps).rsqrt()
        normal = (wide - mean.view(shape)) * rstd.view(shape)
        out = normal if weight is None else normal * weight.view(shape) + bias.view(shape)
        ctx.save_for_backward(normal, rstd, weight)
        ctx.shape, ctx.dims, ctx.count, ctx.counts = shape, dims, float(count), counts
        ctx.mark_non_differentiable(mean, var, count)
        return out.to(x.dtype), mean, var, count

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        normal, rstd, weight = ctx.saved_tensors
        shape, dims = ctx.shape, ctx.dims
        grad = grads[0].double()
        grad_bias, grad_weight = grad.sum(dims), (grad * normal).sum(dims)
        scaled = grad if weight is None else grad * weight.view(shape)
        sums = torch.cat([scaled.sum(dims), (scaled * normal).sum(dims)])
        if not ctx.counts:
            sums.zero_()
        # The loss of one rank reaches the other ranks' inputs through the shared statistics: their gradients are summed here.
        dist.all_reduce(sums)
        mean_grad, mean_grad_normal = (part.view(shape) / ctx.count for part in sums.chunk(2))
        grad_x = (scaled - mean_grad - normal * mean_grad_normal) * rstd.view(shape)
        if weight is None:
            return grad_x.to(grads[0].dtype), None, None, None, None
        return grad_x.to(grads[0].dtype), grad_weight.to(weight.dtype), grad_bias.to(weight.dtype), None, None
