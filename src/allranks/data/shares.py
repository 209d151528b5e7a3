"""How is a global batch divided: over the ranks, and within a rank into micro-batches?

    global batch of b samples     |0 1 2 3 4|5 6 7 8 9|...      one slice of the epoch's order
    share of a rank               |0 1 2 3 4|                   shares differ by at most one, lower ranks get more
    micro-batches of the share    |0 1 2|3 4|                   the same number on every rank, sizes differ by at most one

Pure arithmetic: no torch, no processes.
"""

from __future__ import annotations

from typing import NamedTuple


def ceil_div(size: int, divisor: int) -> int:
    """How many parts of at most `divisor` items `size` items make."""
    return -(-size // divisor)


def split(size: int, num_parts: int, index: int) -> tuple[int, int]:
    """Start and stop of one of `num_parts` contiguous parts of `size` items; the first parts get the remainder."""
    quotient, remainder = divmod(size, num_parts)
    start = index * quotient + min(index, remainder)
    return start, start + quotient + (index < remainder)


def micro_batch_size_of(global_batch_size: int, world_size: int, accumulation_steps: int) -> int:
    """Samples of the largest micro-batch when a full global batch is done in `accumulation_steps` parts."""
    return ceil_div(ceil_div(global_batch_size, world_size), accumulation_steps)


class Part(NamedTuple):
    """One rank's part of a global batch: what one micro-batch is made of.

    Attributes:
        micro: Index of the micro-batch in its window.
        start, stop: The samples to load, as offsets in the global batch.
        num_samples: stop - start, or 0 for a stand-in whose samples belong to rank 0.
    """

    micro: int
    start: int
    stop: int
    num_samples: int


def num_micro_of(size: int, world_size: int, micro_batch_size: int) -> int:
    """Micro-batches that every rank does for a global batch of `size` samples."""
    return ceil_div(ceil_div(size, world_size), micro_batch_size)


def parts_of(size: int, rank: int, world_size: int, micro_batch_size: int, *, stand_ins: bool) -> list[Part]:
    """The micro-batches of one rank for a global batch of `size` samples, in order.

    Args:
        size: Samples of the global batch over all ranks, at least 1.
        micro_batch_size: Most samples in a micro-batch.
        stand_ins: Training: a rank without a sample in a micro-batch loads rank 0's samples of it, so that every
            rank has the same number. Evaluation: such a part is left out.
    """
    num_micro = num_micro_of(size, world_size, micro_batch_size)
    first, last = split(size, world_size, rank)
    first_of_rank_0, last_of_rank_0 = split(size, world_size, 0)
    parts: list[Part] = []
    for micro in range(num_micro):
        start, stop = split(last - first, num_micro, micro)
        if start < stop:
            parts.append(Part(micro, first + start, first + stop, stop - start))
        elif stand_ins:
            # Rank 0 has the largest share and num_micro is at most that share, so its part is never empty.
            start, stop = split(last_of_rank_0 - first_of_rank_0, num_micro, micro)
            parts.append(Part(micro, start, stop, 0))
    return parts
