"""How many loader workers, for the cores this rank may use?"""

from __future__ import annotations

# Beyond 8 workers a rank is usually held up by its storage or its main process; who needs more says so.
_MOST = 8


def auto_num_workers(num_cores: float, device_type: str) -> int:
    """Loader workers for one rank.

    Args:
        num_cores: Of this rank: its own ones, and its part of those that it shares with others.
        device_type: On "cpu" the cores are for the training itself: a quarter of them read data. Otherwise all but one.

    Returns:
        0 where the rank has a single core: a worker would only take turns with the training.
    """
    mine = int(num_cores + 1e-6)
    if mine <= 1:
        return 0
    return min(_MOST, mine // 4 if device_type == "cpu" else mine - 1)
