"""Which learning rate goes with a larger batch? The two rules people use, or none, and a warm-up."""

from __future__ import annotations

import math

from allranks.core.errors import UsageError


class ScaledLR(float):
    """A learning rate that remembers its warm-up until run.optimizer takes it in; otherwise a plain number."""

    warmup_steps: int = 0


def scale_lr(
    lr: float, global_batch_size: int, base_batch_size: int, rule: str, warmup_steps: int
) -> ScaledLR:
    """Scale a learning rate found at one batch size to another.

    Args:
        lr: The learning rate that is right at `base_batch_size`.
        global_batch_size: Samples per update now.
        base_batch_size: Samples per update then.
        rule: "linear" (lr grows with the batch; SGD), "sqrt" (with its root; Adam) or "none".
        warmup_steps: Updates over which run.optimizer raises the rate linearly from lr / warmup_steps.

    Source: Goyal et al. 2017, arXiv:1706.02677 (linear, with warm-up); Malladi et al. 2022, arXiv:2205.10287 (square root, for Adam).
    """
    if base_batch_size < 1 or warmup_steps < 0 or not lr > 0:
        raise UsageError(
            "AR114",
            f"scale_lr({lr}, base_batch_size={base_batch_size}, warmup_steps={warmup_steps})",
            fix="lr > 0, base_batch_size >= 1, warmup_steps >= 0",
        )
    ratio = global_batch_size / base_batch_size
    factors = {"linear": ratio, "sqrt": math.sqrt(ratio), "none": 1.0}
    if rule not in factors:
        raise UsageError("AR114", f"rule={rule!r}", fix="rule='linear', 'sqrt' or 'none'")
    scaled = ScaledLR(lr * factors[rule])
    scaled.warmup_steps = warmup_steps
    return scaled
