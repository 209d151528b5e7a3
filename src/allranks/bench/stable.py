"""How long is a step, and how sure is that? From the moments at which steps ended. No torch.

Steps are taken together into blocks of at least BLOCK_S; the figure is the median of the blocks, and its uncertainty the half width of
the usual interval of a median (1.57 x the middle half / the root of the number of blocks), which a few disturbed blocks do not widen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles

BLOCK_S = 0.1
MIN_BLOCKS = 8
SURE = 0.02
"""A figure is stable if it is known to 2 %."""


@dataclass(frozen=True, slots=True)
class Figure:
    """Seconds per step."""

    step_s: float
    sure: float
    """Relative half width; inf with fewer than 4 blocks."""
    blocks: int

    @property
    def is_stable(self) -> bool:
        """Whether more steps would hardly change it."""
        return self.blocks >= MIN_BLOCKS and self.sure <= SURE


def blocks_of(ends: Sequence[float]) -> list[float]:
    """Seconds per step of consecutive blocks of steps, from the moments at which steps ended."""
    found: list[float] = []
    begun = 0
    for place in range(1, len(ends)):
        if ends[place] - ends[begun] >= BLOCK_S:
            found.append((ends[place] - ends[begun]) / (place - begun))
            begun = place
    return found


def figure(ends: Sequence[float]) -> Figure | None:
    """What these steps say; None of fewer than two."""
    if len(ends) < 2:
        return None
    blocks = blocks_of(ends) or [(ends[-1] - ends[0]) / (len(ends) - 1)]
    return Figure(median(blocks), uncertainty(blocks), len(blocks))


def uncertainty(values: Sequence[float]) -> float:
    """Relative half width of the interval of their median; inf of fewer than 4."""
    if len(values) < 4:
        return math.inf
    low, middle, high = quantiles(values, n=4)
    return 1.57 * (high - low) / math.sqrt(len(values)) / middle / 2 if middle else math.inf
