"""What do we need of DDP that has no public name? Everything private of DDP is here, each with a fallback."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from allranks.comm.memory import MemorySum

_INDICES = re.compile(r"did not receive grad for rank \d+: ([\d ]+)")


def replicate(
    module: nn.Module,
    device: torch.device,
    *,
    bucket_cap_mb: float | None,
    static_graph: bool,
    find_unused_parameters: bool,
) -> DistributedDataParallel:
    """Wrap for replication: same weights and buffers everywhere now, gradients averaged in every synchronised backward.

    Buffers are not broadcast in every forward (wrap/buffers.py does what is needed, and not inside a forward, where a rank that
    evaluates alone would wait for the others).
    """
    # torch >= 2.13 renames broadcast_buffers and warns; under the old name False also meant: never, not even at the start.
    names = inspect.signature(DistributedDataParallel.__init__).parameters
    options: dict[str, Any] = {
        "forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers": False
    }
    if bucket_cap_mb is not None:
        options["bucket_cap_mb"] = bucket_cap_mb
    return DistributedDataParallel(
        module,
        device_ids=[device.index] if device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        find_unused_parameters=find_unused_parameters,
        static_graph=static_graph,
        **options,
    )


def unreduced(replica: DistributedDataParallel) -> list[int]:
    """Indices (among the parameters that require a gradient) that got none in the backward just done; 0.2 us when there are none.

    Without this check the bucket that holds them is never reduced: the other ranks wait, and this one learns of it in its next
    forward. Empty, too, where torch no longer offers the check; then that next forward raises.
    """
    check = getattr(replica.reducer, "_check_reducer_finalized", None)
    if check is None:
        return []
    try:
        check()
    except RuntimeError as error:
        found = _INDICES.search(str(error))
        if found is None:
            raise
        return [int(i) for i in found.group(1).split()]
    return []


def average_through(replica: DistributedDataParallel, memory: MemorySum) -> None:
    """Have the gradients of every synchronised backward averaged by `memory`, and not by the process group. Collective.

    Nothing else of DDP changes: buckets, windows without synchronisation, the search for unused parameters.
    """

    # Without annotations: torch compares them with its own types, and refuses strings.
    def hook(state, bucket):
        return memory.add(bucket.buffer(), bucket.is_last())

    replica.register_comm_hook(None, hook)


def hook_into(replica: DistributedDataParallel, take: Callable[[Any], Any]) -> None:
    """Give every bucket of a synchronised backward to `take`, which returns a future of its mean. Collective."""

    def hook(state, bucket):  # without annotations, as above
        return take(bucket)

    replica.register_comm_hook(None, hook)


def gives_sparse_gradients(module: nn.Module) -> bool:
    """Whether DDP will get sparse gradients; it looks for the same layers."""
    return any(isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and m.sparse for m in module.modules())


def logged(replica: DistributedDataParallel) -> dict[str, Any]:
    """What DDP knows of its buckets and of the time of its backwards, in ns; empty where this torch does not tell."""
    tell = getattr(replica, "_get_ddp_logging_data", None)
    try:
        return dict(tell()) if tell is not None else {}
    except (RuntimeError, TypeError, ValueError):
        return {}
