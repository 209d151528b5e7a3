"""Which calls of torch, and of loggers, are marked? One function per module, called right after that module was imported.

A mark never changes what a call does, takes or returns; if it cannot be made, it is left out (compat.step_aside).
"""

from __future__ import annotations

from types import ModuleType

from allranks.record import (
    compat,
    compiling,
    files,
    logged,
    probe_collectives,
    probe_loaders,
    probe_training,
    process,
    schedulers,
    unmatched,
    windows,
)
from allranks.record import layout as at


def _torch_is_here(module: ModuleType) -> None:
    process.set_flag(at.TORCH_IMPORTED)
    process.WRITER.mark(at.PYTHON)


def _optimizers(module: ModuleType) -> None:
    probe_training.mark_optimizers(module)
    windows.mark_zeroing(module)


def _replicas(module: ModuleType) -> None:
    probe_training.mark_replicas(module)
    unmatched.mark(module.DistributedDataParallel)


def _compiled(module: ModuleType) -> None:
    compiling.hide_from_dynamo(module)
    unmatched.mark(module.OptimizedModule)


MARKS = {
    "torch": _torch_is_here,
    "torch.autograd": probe_training.mark_backward,
    "torch.serialization": files.mark_files,
    "torch.optim.optimizer": _optimizers,
    "torch.nn.modules.module": windows.mark_modules,
    "torch.optim.lr_scheduler": schedulers.mark_schedulers,
    "torch.distributed.distributed_c10d": probe_collectives.mark_collectives,
    "torch.nn.parallel.distributed": _replicas,
    "torch._dynamo.eval_frame": _compiled,
    "torch._dynamo": compiling.substitute_compiled,
    "torch.utils.data.dataloader": probe_loaders.mark_loaders,
    "torch.utils.data._utils.worker": probe_loaders.mark_workers,
    "torch.utils.data._utils.fetch": probe_loaders.mark_fetching,
    "torchdata.stateful_dataloader.stateful_dataloader": probe_loaders.mark_stateful_loaders,
    "torchdata.stateful_dataloader.worker": probe_loaders.mark_workers,
    "torch.utils.tensorboard.writer": logged.mark_tensorboard,
    "tensorboardX.writer": logged.mark_tensorboard,
    "wandb.sdk.wandb_run": logged.mark_wandb,
    "mlflow.tracking.fluent": logged.mark_mlflow,
    "allranks.metrics.sinks": logged.mark_run_log,
}


def mark_module(module: ModuleType) -> None:
    """Mark the calls of one module; never raises."""
    try:
        MARKS[module.__name__](module)
    except Exception as error:  # noqa: BLE001 - an unknown torch must not break the user's import
        compat.step_aside(module.__name__, error)
    else:
        process.set_flag(at.PROBED)
