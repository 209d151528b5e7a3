"""What does the loop know about the micro-batch it was just given?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class MicroBatch:
    """One rank's part of a global batch, beside the data itself.

    Attributes:
        batch: Index of the global batch in the epoch.
        micro: Index of this micro-batch in its window, 0 to num_micro - 1.
        num_micro: Micro-batches of the window; the same on every rank in training.
        is_last: The last micro-batch of the window: gradients are synchronised here.
        num_samples: This rank's own samples in it; 0 for a stand-in, whose loss must count for nothing.
        global_samples: Samples of the whole global batch over all ranks; 0 where a stream does not tell (evaluation).
        position: Place of the first sample in the epoch's global order.
        next_state: The data set's own state for what follows this micro-batch, where an iterable data set has one.
    """

    __slots__ = (
        "_order",
        "_start",
        "_stop",
        "_stride",
        "batch",
        "global_samples",
        "is_last",
        "micro",
        "next_state",
        "num_micro",
        "num_samples",
        "position",
    )

    def __init__(
        self,
        batch: int,
        micro: int,
        num_micro: int,
        num_samples: int,
        global_samples: int,
        position: int,
        order: Any = None,
        start: int = 0,
        stop: int = 0,
        stride: int = 1,
        next_state: Any = None,
    ) -> None:
        self.batch, self.micro, self.num_micro = batch, micro, num_micro
        self.is_last = micro == num_micro - 1
        self.num_samples, self.global_samples, self.position = num_samples, global_samples, position
        self._order, self._start, self._stop, self._stride = order, start, stop, stride
        self.next_state = next_state

    @property
    def positions(self) -> Sequence[int]:
        """Places of this rank's samples in the epoch's global order; empty for a stand-in."""
        return range(self.position, self.position + self.num_samples * self._stride, self._stride)

    @property
    def indices(self) -> list[Any] | None:
        """This rank's indices in the data set; empty for a stand-in, None for an iterable data set."""
        if self._order is None:
            return None
        return self.indices_to_load() if self.num_samples else []

    def indices_to_load(self) -> list[Any]:
        """What is read from the data set: the same as `indices`, but a stand-in's are those of rank 0."""
        picked = self._order[self._start : self._stop]
        return picked.tolist() if isinstance(picked, torch.Tensor) else list(picked)

    def slice_to_load(self) -> Any:
        """The same as a tensor or a range, without a copy, where the order is one."""
        return self._order[self._start : self._stop]

    def __repr__(self) -> str:
        return (
            f"MicroBatch(batch={self.batch}, micro={self.micro}/{self.num_micro}, "
            f"num_samples={self.num_samples}/{self.global_samples}, position={self.position})"
        )
