"""How many threads does one operation of this rank use on a CPU?"""

from __future__ import annotations

import os

import torch

from allranks.core.cores import usable_cores
from allranks.core.place import Place


def share_threads(place: Place, asked: int | None = None) -> str:
    """Divide the usable cores fairly among the local ranks and set torch's intra-op threads; say what was done.

    torchrun sets OMP_NUM_THREADS=1 when several processes share a machine, which is right for GPUs and a trap on CPUs:
    a rank that owns 16 cores computes on one. A number the user set himself is kept.

    Returns:
        One sentence for the log.
    """
    cores = usable_cores()
    if asked is not None:
        torch.set_num_threads(max(1, asked))
        return f"{torch.get_num_threads()} intra-op threads, as asked"
    set_by_user = os.environ.get("OMP_NUM_THREADS")
    by_launcher = (place.launcher == "torchrun" and set_by_user == "1") or "ALLRANKS_OMP" in os.environ
    if set_by_user and not by_launcher:
        return f"{torch.get_num_threads()} intra-op threads, as OMP_NUM_THREADS={set_by_user} says"
    threads = max(1, cores // max(1, place.local_world_size))
    if threads != torch.get_num_threads():
        torch.set_num_threads(threads)
    return f"{threads} intra-op thread{'s' * (threads != 1)}: {cores} usable cores among {_ranks(place)}"


def _ranks(place: Place) -> str:
    return f"{place.local_world_size} local rank{'s' * (place.local_world_size != 1)}"
