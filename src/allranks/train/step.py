"""What happens in run.step(loss)? Backward, one synchronisation per update, and the update one device would have made.

The gradient of an update is the mean over all samples of the global batch, whatever share each rank and micro-batch had:

    micro-batch of n of the B samples   loss is its mean:  weight n / B          (B is known to the loader: no communication)
    weights given                       loss is a sum:     1 / (sum of weights)  (one small all-reduce beside the backward)

DDP divides by the number of ranks W, so a loss is scaled by W times its weight before backward.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import has_torch_function_unary

from allranks.core.errors import UsageError, warn_once
from allranks.data.batch import MicroBatch
from allranks.train import kernels
from allranks.train.plain_step import step_plainly
from allranks.train.pooling import pool_gradients, used_anywhere
from allranks.train.slots import OptimizerSlot, Update, check_apart
from allranks.wrap.model import Model, Window
from allranks.wrap.precision import Precision, agree_on_inf, scale_all
from allranks.wrap.straight import Bucket


class Stepper:
    """The step of one run: knows the window, the models and the optimizers."""

    def __init__(
        self, *, world_size: int, device: torch.device, precision: Precision, window: Window
    ) -> None:
        self.world_size, self.device, self.precision, self.window = world_size, device, precision, window
        self.models: dict[str, Model] = {}
        self.slots: dict[str, OptimizerSlot] = {}
        self.micro_batch: MicroBatch | None = None  # of the training loader in use; None in loops without one
        self.stepped = True  # the current micro-batch went through step
        self._factors: dict[tuple[float, torch.dtype], torch.Tensor] = {}
        self.some_unused: dict[
            str, bool
        ] = {}  # by model, once known: some rank left parameters without gradient in the first update

    # -- the whole step ------------------------------------------------------------------------------------------------------

    def step(
        self,
        loss: torch.Tensor | None,
        *,
        weight: float | None,
        optimizer: torch.optim.Optimizer | None,
        clip_norm: float | None,
        clip_value: float | None,
        retain_graph: bool,
    ) -> Update | None:
        """See Run.step."""
        slot = self.slot_of(optimizer)
        last = self.window.is_last
        if (
            last
            and weight is None
            and clip_norm is None
            and clip_value is None
            and type(loss) is torch.Tensor
        ):
            update = step_plainly(self, slot, loss, retain_graph)
            if update is not None:
                return update
        total = self._backward(slot, loss, weight, last, retain_graph)
        return self.finish(slot, total, clip_norm, clip_value) if last else None

    def backward(
        self,
        loss: torch.Tensor | None,
        *,
        weight: float | None,
        optimizer: torch.optim.Optimizer | None,
        retain_graph: bool,
    ) -> None:
        """See Run.backward."""
        slot = self.slot_of(optimizer)
        if self.world_size > 1 and self.window.is_last:
            for model in self.models_of(slot):
                if model.is_reduced:
                    raise UsageError(
                        "AR116",
                        f"a second backward through {model.name} in one update, after its gradients were averaged",
                        why="DDP averages in the first backward; what the second adds would stay on this rank",
                        fix="with run.accumulate(): around the forwards and backwards of the update, then run.update()",
                    )
                model.is_reduced = model.pending
        self._backward(slot, loss, weight, False, retain_graph)

    def update(
        self, *, optimizer: torch.optim.Optimizer | None, clip_norm: float | None, clip_value: float | None
    ) -> Update:
        """See Run.update."""
        slot = self.slot_of(optimizer)
        total = self._close_weights(slot) if slot.weighted else None
        return self.finish(slot, total, clip_norm, clip_value)

    def slot_of(self, optimizer: torch.optim.Optimizer | None) -> OptimizerSlot:
        """The slot of an optimizer; of the only one if none is given."""
        if optimizer is None:
            if len(self.slots) == 1:
                return next(iter(self.slots.values()))
            if not self.slots:
                raise UsageError(
                    "AR105",
                    "step before an optimizer is known",
                    fix="optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))",
                )
            raise UsageError(
                "AR105",
                f"{len(self.slots)} optimizers are registered, and step does not say which one to use",
                fix="run.step(loss, optimizer=...)",
            )
        for slot in self.slots.values():
            if slot.optimizer is optimizer:
                return slot
        raise UsageError(
            "AR105",
            f"this {type(optimizer).__name__} was not given to run.optimizer",
            fix="optimizer = run.optimizer(optimizer)",
        )

    def models_of(self, slot: OptimizerSlot) -> list[Model]:
        """The models an optimizer trains; looked up again only when models or parameter groups were added.

        Raises:
            UsageError: AR118 one of them has sync_every and cannot share this optimizer.
        """
        num_parameters = 0
        for group in slot.optimizer.param_groups:
            num_parameters += len(group["params"])
        if slot.models_key != (key := (len(self.models), num_parameters)):
            mine = {id(p) for p in slot.parameters()}
            models = [m for m in self.models.values() if any(id(p) in mine for p in m.parameters())]
            check_apart(slot, models, self.slots.values())
            slot.models, slot.models_key = models, key
        return slot.models

    def _check_loss(self, loss: torch.Tensor) -> None:
        if not isinstance(loss, torch.Tensor):
            raise UsageError(
                "AR101",
                f"step takes a loss tensor, not a {type(loss).__name__}",
                fix="run.step(loss), without .item(); None to take part with zero",
            )
        if loss.numel() != 1:
            raise UsageError(
                "AR101",
                f"the loss has shape {tuple(loss.shape)}, not one value",
                fix="loss.mean(), or loss.sum() with weight=",
            )
        if not loss.requires_grad:
            raise UsageError(
                "AR102",
                "the loss does not depend on a parameter: there is nothing to train",
                why="likely it was computed under torch.no_grad or in run.evaluate, or from a detached tensor",
                fix="compute the loss from the model's output with gradients enabled",
            )
        if loss.device != self.device:
            raise UsageError(
                "AR103",
                f"the loss is on {loss.device}, this rank computes on {self.device}",
                why="the model or the batch did not come from run.model or run.loader",
                fix=f"move it: .to({str(self.device)!r})",
            )

    def _note_weight(self, slot: OptimizerSlot, loss: Any, weight: float | None) -> None:
        """Keep the window's weights."""
        if weight is not None and not weight >= 0:
            raise UsageError(
                "AR106",
                f"weight={weight}",
                fix="the number of tokens, pixels or samples the loss is summed over, 0 or more",
            )
        gives = weight is not None
        if loss is not None and slot.weighted is not None and slot.weighted != gives:
            raise UsageError(
                "AR106",
                f"this step has {'a' if gives else 'no'} weight, the steps before had {'none' if gives else 'one'}",
                fix="give weight= in every step, or in none",
            )
        if loss is not None or gives or slot.weighted is None:
            slot.weighted = gives
        if slot.weighted:
            slot.window_weight += float(weight or 0)

    def _close_weights(self, slot: OptimizerSlot) -> _Total:
        """Start to add the window's weights up over the ranks. Collective."""
        total = _Total(slot.window_weight, 1 if self._trains_apart(slot) else self.world_size)
        slot.window_weight = 0.0
        return total

    def _trains_apart(self, slot: OptimizerSlot) -> bool:
        """Whether ranks make this update each for itself."""
        return self.world_size > 1 and any(m.local_steps is not None for m in self.models_of(slot))

    def _factor(self, slot: OptimizerSlot) -> float:
        if slot.weighted:
            return 1.0 if self._trains_apart(slot) else float(self.world_size)
        batch = self.micro_batch
        if batch is None:
            return 1.0  # a batch that is not from run.loader: every rank's loss counts the same
        return batch.num_samples * self.world_size / batch.global_samples

    # -- backward ------------------------------------------------------------------------------------------------------------

    def _backward(
        self,
        slot: OptimizerSlot,
        loss: torch.Tensor | None,
        weight: float | None,
        closes: bool,
        retain_graph: bool,
    ) -> _Total | None:
        """Add this micro-batch's gradients; `closes` if the window ends with it: the total of the weights is then on its way."""
        self.stepped = True
        batch = self.micro_batch
        if loss is not None:
            self._check_loss(loss)
        if batch is not None and batch.global_samples == 0 and weight is None:
            weight = batch.num_samples  # a stream that does not tell the size of its batches beforehand
            loss = loss * weight if loss is not None else None
        if weight is not None or slot.weighted is not False:
            self._note_weight(slot, loss, weight)
        total = self._close_weights(slot) if slot.weighted and closes else None
        if loss is not None:
            self._add_gradients(slot, loss, retain_graph, closes)
        elif self.window.is_last and self.world_size > 1:
            for model in self.models_of(slot):
                if model.name not in slot.last_pooled:
                    model.join_with_zero()
        return total

    def _add_gradients(
        self, slot: OptimizerSlot, loss: torch.Tensor, retain_graph: bool, closes: bool
    ) -> None:
        factor = self._factor(slot)
        if self.precision.scaler is not None:
            loss = self.precision.scaler.scale(loss)
        model = self._taken(loss) if closes else None
        if model is not None:
            model.backward_straight(loss, self.gradient_of(factor, loss), retain_graph)
            return
        gradient = None if factor == 1.0 else self.gradient_of(factor, loss)
        # With several optimizers a loss reaches into models it does not train (a generator's goes through the discriminator):
        # their gradients must neither pile up in the window nor start a reduction.
        inputs = slot.parameters() if len(self.slots) > 1 else None
        if inputs is not None:
            inputs = [p for p in inputs if p.requires_grad]
        loss.backward(gradient, retain_graph=retain_graph, inputs=inputs)

    def _taken(self, loss: torch.Tensor) -> Model | None:
        """The model whose gradients are averaged without DDP in this backward (wrap/straight.py), if it is the only one."""
        if len(self.models) != 1 or len(self.slots) != 1 or has_torch_function_unary(loss):
            return None
        model = next(iter(self.models.values()))
        return model if model.goes_straight() else None

    def gradient_of(self, factor: float, loss: torch.Tensor) -> torch.Tensor:
        key = (factor, loss.dtype)
        found = self._factors.get(key)
        if found is None or found.shape != loss.shape:
            if len(self._factors) > 64:
                self._factors.clear()
            found = self._factors[key] = torch.full(loss.shape, factor, dtype=loss.dtype, device=loss.device)
        return found

    # -- the end of a window -------------------------------------------------------------------------------------------------

    def finish(
        self, slot: OptimizerSlot, total: _Total | None, clip_norm: float | None, clip_value: float | None
    ) -> Update:
        models = self.models_of(slot) if self.world_size > 1 else []
        clip_norm, clip_value = clip_norm or slot.clip_norm, clip_value or slot.clip_value
        whole = None
        if total is None and clip_norm is None and clip_value is None and self.precision.scaler is None:
            whole = self._in_one_piece(slot, models)
        if models and whole is None:
            self._reduce(slot, models)
        update = Update(slot.updates + 1)
        if total is not None:
            update.weight = total.wait()
            if update.weight == 0 and not self._trains_apart(slot):
                warn_once(
                    "AR111",
                    "an update in which all weights are 0 on all ranks was skipped: no target counted",
                )
                update.skipped = True
            elif update.weight:
                scale_all(slot.gradients(), 1.0 / update.weight)
        if not update.skipped:
            self.apply(slot, update, clip_norm, clip_value, whole)
        self.after(slot, update, models)
        return update

    def _in_one_piece(self, slot: OptimizerSlot, models: list[Model]) -> Bucket | None:
        """All gradients of this update, averaged and one after the other, where nobody needs to see them before the optimizer."""
        if len(models) != 1 or slot.last_pooled or self.some_unused.get(models[0].name) is not False:
            return None
        return models[0].complete_in_one_piece()

    def _reduce(self, slot: OptimizerSlot, models: list[Model]) -> None:
        pooled: set[str] = set()
        for model in models:
            if model.replica is None or model.local_steps is not None:
                continue
            if not model.pending:
                pool_gradients(model.trainable)
                pooled.add(model.name)
                continue
            unused, gave_no_loss = model.complete()
            some_unused = self.some_unused.get(model.name)
            if some_unused is None:
                self.some_unused[model.name] = self._find_unused(model, unused, gave_no_loss)
            elif some_unused:
                self._keep_none(model, unused)
        if pooled != slot.last_pooled:
            slot.last_pooled = frozenset(pooled)

    def _find_unused(self, model: Model, unused: list[int], gave_no_loss: bool) -> bool:
        """In the first update: does some rank have parameters without gradient? Then every update looks. Collective."""
        count = torch.tensor([0 if gave_no_loss else len(unused)])
        dist.all_reduce(count, op=dist.ReduceOp.MAX)
        if count.item() == 0:
            return False
        nowhere = self._keep_none(model, unused)
        names = [model.trainable_names[i] for i in (nowhere or unused)]
        if names:
            shown = ", ".join(names[:6]) + (" ..." if len(names) > 6 else "")
            warn_once(
                "AR285",
                f"{model.name}: no gradient {'on any rank' if nowhere else 'on this rank'} in the first update for {len(names)} "
                f"parameter{'s' * (len(names) != 1)}: {shown}; left without one, as on one device. requires_grad_(False) for what "
                "is not meant to train makes this go away",
            )
        return True

    def _keep_none(self, model: Model, unused: list[int]) -> list[int]:
        """Give back None for parameters that no rank used: an optimizer leaves those alone on one device. Collective."""
        mine = set(unused)
        used = used_anywhere(model.trainable, [i not in mine for i in range(len(model.trainable))])
        nowhere = [i for i, u in enumerate(used) if not u]
        for i in nowhere:
            model.trainable[i].grad = None
        return nowhere

    def apply(
        self,
        slot: OptimizerSlot,
        update: Update,
        clip_norm: float | None,
        clip_value: float | None,
        whole: Bucket | None,
    ) -> None:
        scaler = self.precision.scaler if self.precision.scaler is not None and slot.gradients() else None
        if scaler is not None:
            scaler.unscale_(slot.optimizer)
            update.skipped = agree_on_inf(scaler, slot.optimizer, self.world_size)
        if clip_norm is not None or clip_value is not None:
            update.grad_norm = slot.clip(clip_norm, clip_value)
        slot.take_step(scaler, whole)
        if scaler is not None:
            scaler.update()

    def after(self, slot: OptimizerSlot, update: Update, models: list[Model]) -> None:
        slot.updates += 1
        if not update.skipped:
            for scheduler in slot.per_update:
                scheduler.step()
        for model in models:
            if slot.updates == 1:
                model.buffers_sync.find_changing()
            if model.local_steps is None or model.local_steps.after_update():
                model.buffers_sync.after_update()
            model.after_update(self.some_unused.get(model.name, False))
        kernels.forget_gradients(slot.optimizer)


class _Total:
    """The sum of weights over all ranks, on its way while the backward runs."""

    __slots__ = ("_handle", "_value")

    def __init__(self, mine: float, world_size: int) -> None:
        self._value = torch.tensor([mine], dtype=torch.float64)
        self._handle = dist.all_reduce(self._value, async_op=True) if world_size > 1 else None

    def wait(self) -> float:
        if self._handle is not None:
            self._handle.wait()
        return float(self._value)
