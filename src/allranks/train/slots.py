"""What belongs to one optimizer: its parameters, clipping, schedulers, warm-up, and the gradients of its update."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from allranks.core.errors import UsageError
from allranks.train import kernels
from allranks.train.quick_sgd import QuickSgd
from allranks.wrap.model import Model
from allranks.wrap.straight import Bucket


@dataclass(slots=True)
class Update:
    """One update of an optimizer, as run.step returns it on the last micro-batch of a window."""

    number: int  # updates of this optimizer so far, this one included
    skipped: bool = False  # no weights were changed: fp16 overflow, or no weight at all in the window
    grad_norm: torch.Tensor | None = None  # (), total L2 norm before clipping; None unless clip_norm is set
    weight: float | None = None  # sum of weights over all ranks and micro-batches, where weights were given


@dataclass(slots=True)
class OptimizerSlot:
    """One registered optimizer and what goes with its updates."""

    name: str
    optimizer: torch.optim.Optimizer
    clip_norm: float | None = None
    clip_value: float | None = None
    warmup_steps: int = 0
    per_update: list[Any] = field(default_factory=list)  # schedulers
    per_epoch: list[Any] = field(default_factory=list)
    updates: int = 0
    weighted: bool | None = None  # whether steps give weights; fixed by the first step of each window
    window_weight: float = 0.0  # this rank's weights so far in the window
    last_pooled: frozenset[str] = frozenset()  # models whose last window was reduced after backward
    models: list[Model] = field(default_factory=list)  # that hold its parameters; kept by Stepper.models_of
    models_key: tuple[int, int] = (-1, -1)
    has_stepped: bool = False  # in this process
    quick: QuickSgd | None = None  # steps in place of optimizer.step() where it can

    def parameters(self) -> list[torch.nn.Parameter]:
        """Every parameter of the optimizer, also those added later."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def gradients(self) -> list[torch.Tensor]:
        """The gradients that are there."""
        return [p.grad for p in self.parameters() if p.grad is not None]

    def clip(self, clip_norm: float | None, clip_value: float | None) -> torch.Tensor | None:
        """Clip the gradients by value, then by norm; the norm before clipping, without waiting for the device."""
        parameters = self.parameters()
        if clip_value is not None:
            torch.nn.utils.clip_grad_value_(parameters, clip_value)
        if clip_norm is None:
            return None
        # One call for all norms and one for all products also on a CPU, where torch would go from one to the next: the same bits.
        is_plain = all(p.grad is None or p.grad.layout is torch.strided for p in parameters)
        return torch.nn.utils.clip_grad_norm_(parameters, clip_norm, foreach=True if is_plain else None)

    def take_step(self, scaler: torch.amp.GradScaler | None, whole: Bucket | None = None) -> None:
        """optimizer.step() with the learning rates of the warm-up, if it is still on.

        Args:
            whole: The gradients, where they are not the parameters' yet.
        """
        if not self.has_stepped:
            self.has_stepped = True
            self.quick = QuickSgd.of(self.optimizer) if kernels.choose(self.optimizer) else None
        if self.updates >= self.warmup_steps:
            self._step(scaler, whole)
            return
        factor = min(1.0, (self.updates + 1) / self.warmup_steps)
        groups = self.optimizer.param_groups
        rates = [g["lr"] for g in groups]
        for group in groups:
            group["lr"] = group["lr"] * factor
        self._step(scaler, whole)
        # The schedulers compute from the rate without warm-up, so every scheduler goes together with it.
        for group, rate in zip(groups, rates, strict=False):
            group["lr"] = rate

    def _step(self, scaler: torch.amp.GradScaler | None, whole: Bucket | None) -> None:
        quick = self.quick
        if whole is not None:
            if quick is not None and quick.step_whole(whole):
                return
            whole.place()
        if scaler is not None:
            scaler.step(self.optimizer)
        elif quick is None or not quick.step():
            self.optimizer.step()


def check_positive(name: str, value: float | None) -> None:
    """Refuse a clip of 0 or less: it would stop the training without a word."""
    if value is not None and not value > 0:
        raise UsageError("AR108", f"{name}={value}", fix=f"{name} > 0, or None for no clipping")


def check_apart(slot: OptimizerSlot, models: list[Model], slots: Iterable[OptimizerSlot]) -> None:
    """Refuse what a model whose ranks train apart (sync_every) cannot share: its optimizer with a model of equal ranks, and its updates.

    Raises:
        UsageError: AR118, the same on every rank.
    """
    apart = [m for m in models if m.local_steps is not None]
    equal = [m for m in models if m.local_steps is None and m.replica is not None]
    if apart and equal:
        raise UsageError(
            "AR118",
            f"optimizer {slot.name!r} trains {apart[0].name}, which has sync_every, and {equal[0].name}, which has not",
            why=f"weights and clipping would follow each rank's own gradients, and {equal[0].name} would differ between ranks",
            fix="an optimizer of its own for each, or the same sync_every for both",
        )
    for model in apart:
        ids = {id(p) for p in model.parameters()}
        both = [s.name for s in slots if any(id(p) in ids for p in s.parameters())]
        if len(both) > 1:
            raise UsageError(
                "AR118",
                f"optimizers {both[0]!r} and {both[1]!r} both train {model.name}, which has sync_every",
                why="each of their steps would count as an update, and ranks would be apart again right after they met",
                fix="one optimizer with a parameter group for each part",
            )
