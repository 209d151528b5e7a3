"""Until when may an optimizer's state be copied while the training goes on?

Until its next step, which is when a torch optimizer changes it: the rest is copied then, before. That hides two thirds of what a save of
Adam on a CPU holds the loop for. Weights are copied at once, since code of the user's may change them at any time (clamping, averaging).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from allranks.ckpt import Checkpoints
from allranks.record.values import Phase
from allranks.record.writer import Writer
from allranks.train.slots import OptimizerSlot


class UntilUpdate:
    """Completes the copy of a save before the state it copies changes."""

    def __init__(self, record: Writer) -> None:
        self._record = record
        self._hooks: list[Any] = []
        self._checkpoints: Checkpoints | None = None

    def begin(self, checkpoints: Checkpoints, slots: Iterable[OptimizerSlot]) -> tuple[str, ...]:
        """Before a save: have the optimizers complete its copy at their next step.

        Returns:
            For `Checkpoints.save(stays=...)`.
        """
        self.end()
        self._checkpoints = checkpoints
        stays = [slot for slot in slots if _changes_only_in_step(slot.optimizer)]
        for optimizer in (slot.optimizer for slot in stays):
            self._hooks.append(optimizer.register_step_pre_hook(self._complete))
            self._hooks.append(optimizer.register_load_state_dict_pre_hook(self._complete))
        return tuple(f"training.optimizers.{slot.name}.state." for slot in stays)

    def _complete(self, *_: Any) -> None:
        if self._checkpoints is None or self._checkpoints.is_settled:
            return
        self._record.phase(Phase.CHECKPOINT)
        try:
            self._checkpoints.settle()
        finally:
            self._record.leave()

    def end(self) -> None:
        """After an update; not within, where torch goes through its hooks. The update may have been skipped, without a step."""
        if self._checkpoints is None:
            return
        self._complete()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._checkpoints = None


def _changes_only_in_step(optimizer: torch.optim.Optimizer) -> bool:
    """Optimizers of others may have more methods that change their state."""
    return type(optimizer).__module__.startswith("torch.optim.") and hasattr(
        optimizer, "register_load_state_dict_pre_hook"
    )
