"""What may be said about sending less, and what does each choice change? Checked before any rank waits for another."""

from __future__ import annotations

from dataclasses import dataclass

from allranks.core.errors import UsageError
from allranks.wrap.wire import METHODS

ACCURACIES = {"lossless": ("none",), "bf16": ("none", "bf16"), "any": METHODS}

WHAT_CHANGES = {
    "bf16": "gradients are rounded to 8 bits on their way between ranks",
    "fp16": "gradients are rounded to 11 bits on their way between ranks, and are 0 below 6e-8",
    "int8": "gradients are rounded to 8 bits of the largest of 1,024; what is lost is added to the next update",
    "powersgd": "matrices of gradients are sent as products of thin ones; what is lost is added to the next update",
}


@dataclass(frozen=True, slots=True)
class CompressSettings:
    """How gradients may be sent.

    Args:
        method: One of METHODS, or "auto".
        rank: Of powersgd's products.
        accuracy: What "auto" may choose from: "lossless", "bf16" (or lossless), "any".
    """

    method: str = "none"
    rank: int = 4
    accuracy: str = "bf16"

    def __post_init__(self) -> None:
        if self.method not in (*METHODS, "auto"):
            raise UsageError(
                "AR117",
                f"compress={self.method!r}",
                fix="compress='none', 'bf16', 'fp16', 'int8', 'powersgd' or 'auto'",
            )
        if self.accuracy not in ACCURACIES:
            raise UsageError(
                "AR117", f"accuracy={self.accuracy!r}", fix="accuracy='lossless', 'bf16' or 'any'"
            )
        if not isinstance(self.rank, int) or isinstance(self.rank, bool) or self.rank < 1:
            raise UsageError(
                "AR117", f"compress_rank={self.rank!r}", fix="a whole number, at least 1; often 1 to 8"
            )

    def allowed(self) -> tuple[str, ...]:
        """What "auto" may choose from, nothing lost first."""
        return ACCURACIES[self.accuracy]


@dataclass(frozen=True, slots=True)
class LocalSettings:
    """How often ranks make their weights equal.

    Args:
        every: Updates between two synchronisations; 1 averages gradients in every update instead.
        outer_optimizer: None takes the mean of the weights; "nesterov" steps towards it, with momentum.
        outer_lr: Its learning rate.
        outer_momentum: Its momentum.
    """

    every: int = 1
    outer_optimizer: str | None = None
    outer_lr: float = 0.7
    outer_momentum: float = 0.9

    def __post_init__(self) -> None:
        if not isinstance(self.every, int) or isinstance(self.every, bool) or self.every < 1:
            raise UsageError("AR118", f"sync_every={self.every!r}", fix="updates, a whole number, at least 1")
        if self.outer_optimizer not in (None, "nesterov"):
            raise UsageError(
                "AR118",
                f"outer_optimizer={self.outer_optimizer!r}",
                fix="outer_optimizer='nesterov', or None for the mean of the weights",
            )
        if self.outer_optimizer is not None and self.every == 1:
            raise UsageError(
                "AR118",
                f"outer_optimizer={self.outer_optimizer!r} with sync_every=1",
                fix="sync_every=16 or more: it steps once per synchronisation",
            )
        if not self.outer_lr > 0 or not 0 <= self.outer_momentum < 1:
            raise UsageError(
                "AR118",
                f"outer_lr={self.outer_lr!r}, outer_momentum={self.outer_momentum!r}",
                fix="outer_lr > 0 (0.7 in the paper), outer_momentum in [0, 1) (0.9)",
            )

    def check_with(self, compress: CompressSettings, *, static_graph: bool) -> None:
        """Refuse what would do nothing, or cannot be."""
        if self.every > 1 and static_graph:
            raise UsageError(
                "AR118",
                f"sync_every={self.every} and static_graph=True: DDP makes a static graph's first update on all ranks",
                fix="one of the two",
            )
        if self.every > 1 and compress.method != "none":
            raise UsageError(
                "AR118",
                f"sync_every={self.every} and compress={compress.method!r}: no gradients are sent",
                fix="one of the two",
            )
