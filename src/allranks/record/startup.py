"""What happens at the start of every Python process of a job, before the user's script?

    page and stacks -> last words -> wait for torch to be imported -> mark its calls (probe.py)

Nothing here may fail the process, and a process that never imports torch pays only for this module.
"""

from __future__ import annotations

import os
import sys

from allranks.record import farewell, process
from allranks.record import layout as at
from allranks.record.imports import AfterImport

# What torch reads when it is imported or makes a group; a user's own value stays.
TORCH_SETTINGS = {
    "TORCH_FR_BUFFER_SIZE": "512",  # a dump of 512 entries takes 5 ms, of the default 2000 20 ms (DIAGNOSIS row 2)
    "TORCH_DISTRIBUTED_DEBUG": "INFO",  # unused parameters by name; never DETAIL: it crashes with DDP on gloo
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
}


def begin(folder: str) -> None:
    """Install the probe; called by boot/sitecustomize.py."""
    try:
        process.open_page(folder)
        farewell.install()
        wait_for_torch()
    except Exception as error:  # noqa: BLE001 - the user's job runs on, only without a record
        if number_of_rank() >= 0:
            print(f"[allranks] no record of process {os.getpid()}: {error!r}", file=sys.stderr)


def wait_for_torch() -> AfterImport:
    """Have torch's calls marked as its modules are imported; those that are there are marked now."""
    hook = AfterImport()
    hook.before["torch"] = before_torch
    hook.after["multiprocessing.process"] = farewell.watch_children
    hook.after["signal"] = _mark_signals
    for name in _MARKED:
        hook.after[name] = _mark_module
    hook.install()
    return hook


def before_torch():
    """torch is about to be imported; gives what ends the phase."""
    for name, value in TORCH_SETTINGS.items():
        os.environ.setdefault(name, value)
    process.WRITER.phase(at.IMPORT)
    try:
        farewell.watch_threads()
    except Exception as error:  # noqa: BLE001 - must not fail the import of torch
        print(f"[allranks] exceptions of threads are not recorded: {error!r}", file=sys.stderr)
    return process.WRITER.leave


# The modules of torch and of loggers whose calls are marked, in probe.MARKS; here by name, so that nothing is imported for them.
_MARKED = (
    "torch",
    "torch.autograd",
    "torch.serialization",
    "torch.nn.modules.module",
    "torch.optim.optimizer",
    "torch.optim.lr_scheduler",
    "torch.distributed.distributed_c10d",
    "torch.nn.parallel.distributed",
    "torch._dynamo.eval_frame",
    "torch._dynamo",
    "torch.utils.data.dataloader",
    "torch.utils.data._utils.worker",
    "torch.utils.data._utils.fetch",
    "torchdata.stateful_dataloader.stateful_dataloader",
    "torchdata.stateful_dataloader.worker",
    "torch.utils.tensorboard.writer",
    "tensorboardX.writer",
    "wandb.sdk.wandb_run",
    "mlflow.tracking.fluent",
    "allranks.metrics.sinks",
)


def _mark_module(module) -> None:
    global _has_failed
    try:
        from allranks.record import probe

        probe.mark_module(module)
    except Exception as error:  # noqa: BLE001 - the user's import of torch must not fail with ours
        if not _has_failed and number_of_rank() >= 0:
            print(f"[allranks] calls are not recorded in process {os.getpid()}: {error!r}", file=sys.stderr)
        _has_failed = True


_has_failed = False


def _mark_signals(module) -> None:
    if process.WRITER.words[at.W_ROLE] != at.RANK_ROLE:
        return  # tools and workers may have signals to themselves
    from allranks.record import signals

    signals.mark_signals(module)


def number_of_rank() -> int:
    """This process's rank by the environment, -1 if it has none."""
    return process.number_in("RANK")
