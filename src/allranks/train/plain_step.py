"""How does a step go in which nothing is unusual? In few calls: in a small model's step each call of Python costs some us, since what is
called is not in the processor's cache between two of torch's own.

One model, one optimizer, a whole batch from run.loader, no weights, no clipping, no scaler, no warm-up, and gradients that go straight
(wrap/straight.py). All else goes through Stepper, which does the same things in the same order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from allranks.train import kernels
from allranks.train.slots import OptimizerSlot, Update

if TYPE_CHECKING:
    from allranks.train.step import Stepper


def step_plainly(
    stepper: Stepper, slot: OptimizerSlot, loss: torch.Tensor, retain_graph: bool
) -> Update | None:
    """The whole of such a step; None if it is not one, and nothing has happened. **Collective**."""
    batch, models, quick = stepper.micro_batch, slot.models, slot.quick
    if (
        quick is None
        or batch is None
        or not batch.global_samples
        or slot.weighted is not False
        or len(models) != 1
        or len(stepper.models) != 1
        or len(stepper.slots) != 1
        or slot.updates < slot.warmup_steps
        or slot.per_update
        or slot.last_pooled
        or slot.clip_norm is not None
        or slot.clip_value is not None
        or stepper.precision.scaler is not None
        or not loss.requires_grad
        or loss.numel() != 1
    ):
        return None
    model = models[0]
    if stepper.some_unused.get(model.name) is not False or model.buffers_sync.changing:
        return None
    if not model.goes_straight():
        return None
    stepper.stepped = True
    factor = batch.num_samples * stepper.world_size / batch.global_samples
    model.backward_straight(loss, stepper.gradient_of(factor, loss), retain_graph)
    whole = model.complete_in_one_piece()
    if whole is None:
        return stepper.finish(slot, None, None, None)
    if not quick.step_whole(whole):
        update = Update(slot.updates + 1)
        stepper.apply(slot, update, None, None, whole)
        stepper.after(slot, update, models)
        return update
    slot.updates += 1
    kernels.forget_gradients(slot.optimizer)
    return Update(slot.updates)
