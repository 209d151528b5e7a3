"""How many threads does one operation of this rank use on a CPU?"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from allranks.core.cores import affinity, share_of_cores, usable_cores
from allranks.core.place import Place


def share_threads(
    place: Place, asked: int | None = None, on_this_host: Sequence[frozenset[int]] | None = None
) -> str:
    """Divide the usable cores fairly among the local ranks and set torch's intra-op threads; say what was done.

    torchrun sets OMP_NUM_THREADS=1 when several processes share a machine, which is right for GPUs and a trap on CPUs:
    a rank that owns 16 cores computes on one. A number the user set himself is kept.

    Args:
        place: Who we are.
        asked: The number, where the user gave one.
        on_this_host: The affinity of each rank on this host; all have this rank's if not given.

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
    mine = affinity()
    local = on_this_host or [mine] * max(1, place.local_world_size)
    sharers = sum(bool(mine & other) for other in local)
    threads = max(1, int(share_of_cores(mine, local, cores) + 1e-6))
    if threads != torch.get_num_threads():
        torch.set_num_threads(threads)
    among = f"among {len(local)} local rank{'s' * (len(local) != 1)}"
    if sharers < len(local):  # bound by the launcher
        among = f"that this rank shares with {sharers - 1} of {len(local) - 1} other local ranks"
    return f"{threads} intra-op thread{'s' * (threads != 1)}: {cores} usable core{'s' * (cores != 1)} {among}"
