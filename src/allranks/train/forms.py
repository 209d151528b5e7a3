"""In which form is a module trained: memory format, and compiled or not?"""

from __future__ import annotations

import torch
from torch import nn

from allranks.core.overrides import note, trial_folder

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def in_form(module: nn.Module, *, channels_last: bool, is_compiled: bool) -> nn.Module:
    """The module as asked for; neither form changes its names in a checkpoint.

    Args:
        channels_last: Keep weights of convolutions with channels innermost (torch.channels_last), which CPUs and tensor cores
            compute quicker; sums are added up in another order.
        is_compiled: Hand it to torch.compile, which needs some seconds, and a compiler, at the first batch.
    """
    if trial_folder() is not None:  # what `allranks tune` need not turn, or must not in silence
        note("has_convolutions", any(parameter.dim() == 4 for parameter in module.parameters()))
        note("has_batch_norm", any(isinstance(layer, BATCH_NORMS) for layer in module.modules()))
    if channels_last:
        module = module.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue] - of all its 4-d weights
    if is_compiled and not hasattr(module, "_orig_mod"):
        module = torch.compile(module)  # pyright: ignore[reportAssignmentType]
    return module
