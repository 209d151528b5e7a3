"""What is a run? The ranks, the models, the loaders and the optimizers of one training, with the loop left to the user."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import nn

from allranks.core.errors import UsageError
from allranks.core.overrides import is_overridden, overridden
from allranks.train.chosen import Explaining, tell_options
from allranks.train.deciding import Deciding
from allranks.train.evaluation import Evaluating
from allranks.train.feeding import Feeding
from allranks.train.forms import in_form
from allranks.train.kernels import use_fused
from allranks.train.saving import Saving
from allranks.train.scaling import ScaledLR, scale_lr
from allranks.train.sending import announce
from allranks.train.slots import OptimizerSlot, Update, check_positive
from allranks.wrap import Ema, Model, plain
from allranks.wrap.settings import CompressSettings, LocalSettings


class Run(Saving, Feeding, Evaluating, Deciding, Explaining):
    """One training on all its ranks; made by allranks.start().

    The methods say which of them are collective. Attributes: `place`, `device`, `run_dir` (None without one), `epoch`, `updates`
    (updates of the weights so far), `models`, `slots` (by optimizer name), `loaders`, `emas`.
    """

    # -- models and optimizers -----------------------------------------------------------------------------------------------

    def model(
        self,
        module: nn.Module,
        *,
        name: str = "",
        sync_batchnorm: bool = False,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        bucket_cap_mb: float | None = None,
        shared_memory: bool | Literal["auto"] = "auto",
        compress: str = "none",
        compress_rank: int = 4,
        accuracy: str = "bf16",
        sync_every: int = 1,
        outer_optimizer: str | None = None,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        channels_last: bool = False,
        compile: bool = False,
    ) -> Model:
        """Move a module to the device and replicate it: rank 0's weights and buffers on every rank. Collective.

        Args:
            module: The plain module (or torch.compile's).
            name: For messages and checkpoints; "model", "model2", ... if not given.
            sync_batchnorm: Batch norm over the samples of all ranks, as one device would; costs two small collectives a layer.
            find_unused_parameters: DDP's own search. Rarely needed: parameters without gradient are dealt with by looking
                at what backward left out, which costs nothing when there are none.
            static_graph: DDP's promise that the graph never changes.
            bucket_cap_mb: DDP's size of a gradient bucket in MiB.
            shared_memory: Ranks on the CPUs of one host exchange gradients through memory, where they can ("auto"); True insists on it.
            compress: How gradients cross the network: "none" loses nothing; "bf16", "fp16", "int8" and "powersgd" send less and change
                what is learned a little; "auto" takes the fastest that `accuracy` allows. See docs/how-to/slow-networks.md.
            compress_rank: Of powersgd's products: more is closer to the gradient, and more to send.
            accuracy: What "auto" may take: "lossless", "bf16" (or lossless), "any".
            sync_every: Updates that each rank makes on its own before the ranks take the mean of their weights. 1: none.
            outer_optimizer: "nesterov" makes the difference since the last mean the gradient of an outer SGD (DiLoCo).
            outer_lr: Its learning rate.
            outer_momentum: Its momentum.
            channels_last: Weights of convolutions with channels innermost, as CPUs and tensor cores like them.
            compile: Hand the module to torch.compile.

        Raises:
            CommError: AR052 shared_memory=True, and the ranks have none in common.
            RanksDisagree: AR280 the ranks built different models.
            UsageError: AR100 the run is over, AR112 the module is replicated already, AR117 and AR118 ways to send that do not work.
        """
        self._require_open("model")
        compress, bucket_cap_mb = overridden("compress", compress), overridden("bucket_cap_mb", bucket_cap_mb)
        sync_every = overridden("sync_every", sync_every)
        if sync_every == 1 and is_overridden("sync_every"):
            outer_optimizer = None  # the script's own: there is nothing for it to step
        sending_by = CompressSettings(compress, compress_rank, accuracy)
        local = LocalSettings(sync_every, outer_optimizer, outer_lr, outer_momentum)
        local.check_with(sending_by, static_graph=static_graph)
        if isinstance(module, (Model, nn.parallel.DistributedDataParallel)):
            raise UsageError(
                "AR112",
                f"this module is a {type(module).__name__} already",
                fix="give run.model the plain module, once",
            )
        if any(plain(m) is plain(module) for m in self.models.values()):
            raise UsageError(
                "AR112",
                f"this {type(plain(module)).__name__} was given to run.model before",
                fix="use what run.model returned",
            )
        module = in_form(
            module,
            channels_last=overridden("channels_last", channels_last),
            is_compiled=overridden("compile", compile),
        )
        name = self._new_name(name or "model", self.models)
        made = Model(
            module,
            self.device,
            world_size=self.world_size,
            window=self._window,
            precision=self.precision,
            name=name,
            sync_batchnorm=sync_batchnorm,
            find_unused_parameters=find_unused_parameters,
            static_graph=static_graph,
            bucket_cap_mb=bucket_cap_mb,
            shared_memory=shared_memory,
            compress=sending_by,
            local=local,
        )
        made.on_options = lambda choices: tell_options(self, made, choices, self._event)
        self.models[name] = made
        announce(self, made, sending_by, local, self._event)
        return made

    @staticmethod
    def module(model: nn.Module) -> nn.Module:
        """The plain module inside a model."""
        return plain(model)

    def optimizer(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        name: str = "",
        clip_norm: float | None = None,
        clip_value: float | None = None,
        warmup_steps: int | None = None,
        scheduler: Any = None,
        scheduler_per: str = "update",
        fused: bool = False,
    ) -> torch.optim.Optimizer:
        """Register an optimizer for run.step; gives it back. Not collective.

        Args:
            optimizer: Over the parameters of models given to run.model.
            name: For messages and checkpoints; "optimizer", "optimizer2", ... if not given.
            clip_norm: Largest total L2 norm of its gradients in an update.
            clip_value: Largest absolute value of each gradient entry.
            warmup_steps: Updates over which the learning rate rises linearly to what the schedulers say.
            scheduler: As given to run.scheduler.
            scheduler_per: "update" or "epoch".
            fused: Step with torch's fused kernel, which is quicker and rounds differently in the last bit. Else with the quickest form
                that gives the same bits.
        """
        self._require_open("optimizer")
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise UsageError(
                "AR105",
                f"run.optimizer takes a torch.optim.Optimizer, not a {type(optimizer).__name__}",
                fix="build it over model.parameters()",
            )
        check_positive("clip_norm", clip_norm)
        check_positive("clip_value", clip_value)
        for group in optimizer.param_groups:
            for key, value in group.items():
                if isinstance(value, ScaledLR):
                    warmup_steps = value.warmup_steps if warmup_steps is None else warmup_steps
                    group[key] = float(value)
        optimizer.defaults = {
            k: float(v) if isinstance(v, ScaledLR) else v for k, v in optimizer.defaults.items()
        }
        self._require_on_device(optimizer)
        if fused:
            use_fused(optimizer)
        name = self._new_name(name or "optimizer", self.slots)
        self.slots[name] = OptimizerSlot(name, optimizer, clip_norm, clip_value, warmup_steps or 0)
        if scheduler is not None:
            self.scheduler(scheduler, per=scheduler_per)
        return optimizer

    def scheduler(self, scheduler: Any, *, per: str = "update") -> Any:
        """Register a learning-rate scheduler: stepped once per update (not once per rank), or once per epoch; gives it back."""
        if per not in ("update", "epoch"):
            raise UsageError("AR113", f"per={per!r}", fix="per='update' or per='epoch'")
        slot = self._stepper.slot_of(getattr(scheduler, "optimizer", None))
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise UsageError(
                "AR113",
                "ReduceLROnPlateau needs a metric: it cannot be stepped for you",
                fix="call scheduler.step(run.mean(loss)) yourself, with a value that is the same on all ranks",
            )
        (slot.per_update if per == "update" else slot.per_epoch).append(scheduler)
        return scheduler

    def ema(self, model: nn.Module, *, decay: float = 0.999, warmup: bool = True, name: str = "") -> Ema:
        """Keep an exponential moving average of a model's weights and buffers, updated after every update. Not collective."""
        ema = Ema(model, decay=decay, warmup=warmup)
        self.emas[self._new_name(name or "ema", self.emas)] = ema
        return ema

    def scale_lr(
        self, lr: float, *, base_batch_size: int, rule: str = "linear", warmup_steps: int = 0
    ) -> ScaledLR:
        """The learning rate for this run's global batch size; see train/scaling.py."""
        if self.global_batch_size is None:
            raise UsageError(
                "AR114",
                "scale_lr needs the global batch size",
                fix="allranks.start(..., global_batch_size=256)",
            )
        return scale_lr(lr, self.global_batch_size, base_batch_size, rule, warmup_steps)

    # -- the loop ------------------------------------------------------------------------------------------------------------

    def epochs(self, num_epochs: int) -> Iterator[int]:
        """Count the epochs, from where the run stands to num_epochs - 1: after a restart, from the newest checkpoint on.

        The beginning and the end of each are **collective**: a stop asked for on any rank ends all ranks after the same epoch.
        """
        self._require_open("epochs")
        self.num_epochs = num_epochs
        self.resume()
        while self.epoch < num_epochs:
            self._stop_reason = self._stop_reason or self._pause.stop_reason
            if self.agreed_stop():
                self._leave_if_told()
                return
            if not self._is_seeded_per_rank:
                self.seed_per_rank()
            self._is_in_epoch = True
            try:
                yield self.epoch
            finally:
                self._is_in_epoch = False
            for slot in self.slots.values():
                for scheduler in slot.per_epoch:
                    scheduler.step()
            self.epoch += 1
            self._end_epoch()
        self._end_training()

    # -- the step ------------------------------------------------------------------------------------------------------------

    def step(
        self,
        loss: torch.Tensor | None,
        *,
        weight: float | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        retain_graph: bool = False,
    ) -> Update | None:
        """Backward and, on the last micro-batch of a window, the update one device would make. **Collective** there.

        Args:
            loss: (), the mean over this micro-batch's samples; with `weight`, the sum. None takes part with zero.
            weight: What the loss was summed over (tokens, pixels, valid targets); the update's gradient is then the sum of losses
                over the sum of weights, over all ranks and micro-batches. With loss=None, 0 (or leave it out after the first step).
            optimizer: Which one, if several are registered; only its parameters get gradients.
            clip_norm: Instead of the optimizer's own.
            clip_value: Instead of the optimizer's own.
            retain_graph: Keep the graph for another backward.

        Returns:
            The update, or None inside a window. Nothing in it waits for the device.

        Raises:
            UsageError: AR100 to AR108; see the text.
        """
        if not self._is_open:
            self._require_open("step")
        if self._window.local:
            raise UsageError(
                "AR107",
                "step inside an evaluation: the last batch came from a loader made for evaluation, or run.evaluate is open",
                fix="run.loader(data, shuffle=True), or train=True to train in the data set's order",
            )
        if not self._is_seeded_per_rank:
            self.seed_per_rank()  # a loop without run.epochs and run.loader: from its second step on
        update = self._stepper.step(
            loss,
            weight=weight,
            optimizer=optimizer,
            clip_norm=clip_norm,
            clip_value=clip_value,
            retain_graph=retain_graph,
        )
        self._steps_in_pass += 1
        if update is not None:
            self._finish_update(update, optimizer)
        return update

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Forwards and backwards inside the block communicate nothing: for loops that step does not fit, before run.update.

        Any number of forwards, backwards and losses, also different ones on each rank. Not collective.
        """
        before, self._window.is_last = self._window.is_last, False
        try:
            yield
        finally:
            self._window.is_last = before

    def backward(
        self,
        loss: torch.Tensor | None,
        *,
        weight: float | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        retain_graph: bool = False,
    ) -> None:
        """Add a loss' gradients, weighted as run.step does, without an update.

        Outside run.accumulate the gradients are averaged over the ranks in this backward, so it is **collective**, and only one of
        them may go through a model between two updates. Arguments as in run.step.

        Raises:
            UsageError: AR116 a second backward after the gradients were averaged; AR100 to AR107 as run.step.
        """
        if not self._is_open:
            self._require_open("backward")
        self._stepper.backward(loss, weight=weight, optimizer=optimizer, retain_graph=retain_graph)

    def update(
        self,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        clip_norm: float | None = None,
        clip_value: float | None = None,
    ) -> Update:
        """Average what backward has added, where it is not averaged yet, and update the weights. **Collective**.

        Returns:
            The update, as run.step does.
        """
        if not self._is_open:
            self._require_open("update")
        update = self._stepper.update(optimizer=optimizer, clip_norm=clip_norm, clip_value=clip_value)
        self._finish_update(update, optimizer)
        return update

    def _finish_update(self, update: Update, optimizer: torch.optim.Optimizer | None) -> None:
        if self.emas and not update.skipped:
            self._update_emas(optimizer)
        self._record.set_step(self.updates, 0, self.epoch)
        for hook in self.on_update:
            hook(update)

    def _update_emas(self, optimizer: torch.optim.Optimizer | None) -> None:
        models = (
            self.models
            if optimizer is None
            else {m.name: m for m in self._stepper.models_of(self._stepper.slot_of(optimizer))}
        )
        for ema in self.emas.values():
            if isinstance(ema.model, Model) and (ema.model.is_apart or ema.model.name not in models):
                continue  # where ranks train apart: averages of what all ranks have in common
            ema.update()
