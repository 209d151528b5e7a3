"""How many loader workers, for the cores this rank may use?"""

from __future__ import annotations

from allranks.core.cores import usable_cores

# Beyond 8 workers a rank is usually held up by its storage or its main process; who needs more says so.
_MOST = 8


def auto_num_workers(local_world_size: int, device_type: str, cores: int | None = None) -> int:
    """Loader workers for one rank.

    Args:
        local_world_size: Ranks that share this machine's cores.
        device_type: On "cpu" the cores are for the training itself: a quarter of them read data. Otherwise all but one.
        cores: Usable cores of this process; found out if not given.

    Returns:
        0 where the rank has a single core: a worker would only take turns with the training.
    """
    mine = (usable_cores() if cores is None else cores) // max(1, local_world_size)
    if mine <= 1:
        return 0
    return min(_MOST, mine // 4 if device_type == "cpu" else mine - 1)
