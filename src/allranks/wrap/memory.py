"""When do gradients go through shared memory? When all ranks are on the CPUs of one host and can share some; else over the network."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from allranks.comm.memory import Refused, open_memory, why_not_here
from allranks.comm.memory.summing import ALIGN
from allranks.core.errors import CommError, warn_once
from allranks.record import compat
from allranks.wrap.reducer import average_through, gives_sparse_gradients

logger = logging.getLogger(__name__)


def share_memory(
    replica: DistributedDataParallel, device: torch.device, name: str, *, is_required: bool
) -> bool:
    """Let `replica` average its gradients in shared memory, if the ranks have some in common. Collective, the same on all ranks.

    Raises:
        CommError: AR052 they have none, and `is_required`.
    """
    parameters = [p for p in replica.module.parameters() if p.requires_grad]
    reason = why_not_here(parameters, device)
    if not reason and gives_sparse_gradients(replica.module):
        reason = "an embedding gives sparse gradients"
    if reason and not is_required and device.type != "cpu":
        return False  # the same on every rank, and known without asking
    room = sum(-(-p.numel() * p.element_size() // ALIGN) * ALIGN for p in parameters) + ALIGN
    memory = open_memory(room, reason)
    if isinstance(memory, Refused):
        if is_required:
            raise CommError(
                "AR052",
                f"{name}: shared_memory=True, but the ranks have no memory in common",
                why=memory.reason,
                fix='shared_memory="auto", which takes the network where there is none',
            )
        if memory.is_one_host and dist.get_rank() == 0:
            warn_once(
                "AR052",
                f"{name}: gradients go over the loopback network, not through memory: {memory.reason}; "
                "run.model(..., shared_memory=False) makes this go away",
            )
        logger.debug("%s: gradients go over the network: %s", name, memory.reason)
        return False
    average_through(replica, memory)
    # The watcher compares how many collectives ranks have issued in a group, DDP's included.
    compat.beside.setdefault(dist.group.WORLD, []).append(memory.issued)
    logger.debug("%s: gradients go through %d MB of shared memory", name, len(memory.memory) >> 20)
    return True
