"""How do ranks exchange gradients in a trial? A script's own way, or another one in its place, under plain DDP and under run.model.

script      as it is
ddp         DDP over the group, nothing else
memory      DDP, gradients through shared memory
fp16 bf16 powersgd      DDP with torch's communication hook of that name
dataparallel            one process, torch's DataParallel over its GPUs: the old baseline
"""

from __future__ import annotations

import functools
from typing import Any

NAMES = ("script", "ddp", "memory", "fp16", "bf16", "powersgd", "dataparallel")
FOR_ONE = ("script", "dataparallel")
"""With one rank there is nothing to exchange."""

_inside_library = False


def apply(name: str) -> None:
    """Have every model of this process replicated in this way; before the script runs."""
    if name == "script":
        return
    _for_library(name)
    _for_plain(name)


def _for_library(name: str) -> None:
    """Change what the script gives to run.model."""
    from allranks.train.run import Run

    model = Run.model
    given = _library_arguments(name)

    @functools.wraps(model)
    def changed(self: Any, module: Any, **settings: Any) -> Any:
        global _inside_library
        if name == "dataparallel":
            module = _data_parallel(module.to(self.device))
        _inside_library = True
        try:
            return model(self, module, **{**settings, **given})
        finally:
            _inside_library = False

    Run.model = changed


def _library_arguments(name: str) -> dict[str, Any]:
    # All ranks are on one host: memory would be taken, and nothing compressed, unless told otherwise.
    compress = name if name in ("fp16", "bf16", "powersgd") else "none"
    apart = {"sync_every": 1, "outer_optimizer": None}  # the script's: no gradients would be sent
    return {"shared_memory": name == "memory", "compress": compress, **apart}


def _for_plain(name: str) -> None:
    """Change what DistributedDataParallel(...) of the script makes."""
    import torch

    parallel: Any = torch.nn.parallel
    ddp = parallel.DistributedDataParallel
    if name == "dataparallel":
        parallel.DistributedDataParallel = lambda module, *_, **__: _data_parallel(module)
        return
    build = ddp.__init__

    @functools.wraps(build)
    def built(self: Any, *args: Any, **settings: Any) -> None:
        build(self, *args, **settings)
        if not _inside_library:
            _hook(self, name)

    ddp.__init__ = built


def _hook(replica: Any, name: str) -> None:
    import torch
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    if name == "memory":
        from allranks.wrap.memory import share_memory

        device = next(replica.module.parameters()).device
        share_memory(replica, torch.device(device.type), "the model", is_required=True)
    elif name in ("fp16", "bf16"):
        hook = default_hooks.fp16_compress_hook if name == "fp16" else default_hooks.bf16_compress_hook
        replica.register_comm_hook(None, hook)
    elif name == "powersgd":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
        replica.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def _data_parallel(module: Any) -> Any:
    import torch

    if torch.cuda.device_count() < 2:
        raise RuntimeError(f"DataParallel needs 2 GPUs or more, here are {torch.cuda.device_count()}")
    return torch.nn.DataParallel(module.cuda())
