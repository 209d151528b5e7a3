"""Which micro-batches does this rank do for the windows of an order?"""

from __future__ import annotations

from collections.abc import Iterator

from allranks.data.batch import MicroBatch
from allranks.data.order import Window
from allranks.data.shares import Part, micro_batch_size_of, num_micro_of, parts_of


class Plan:
    """How global batches are divided; the sizes are worked out once for each size of a global batch.

    Args:
        global_batch_size: None with a batch sampler: each batch is then divided by its own size.
        stand_ins: Training: every rank gets the same number of micro-batches.
    """

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        global_batch_size: int | None,
        accumulation_steps: int = 1,
        micro_batch_size: int | None = None,
        stand_ins: bool,
    ) -> None:
        self.rank, self.world_size, self.stand_ins = rank, world_size, stand_ins
        self.global_batch_size, self.accumulation_steps = global_batch_size, accumulation_steps
        self.micro_batch_size = micro_batch_size
        self._parts: dict[int, tuple[int, list[Part]]] = {}

    def micro_size(self, size: int) -> int:
        """Most samples in a micro-batch of a global batch of `size`."""
        return self.micro_batch_size or micro_batch_size_of(
            self.global_batch_size or size, self.world_size, self.accumulation_steps
        )

    def parts(self, size: int) -> tuple[int, list[Part]]:
        """The number of micro-batches of a global batch of `size` samples, and this rank's own."""
        if (known := self._parts.get(size)) is None:
            micro = self.micro_size(size)
            known = self._parts[size] = (
                num_micro_of(size, self.world_size, micro),
                parts_of(size, self.rank, self.world_size, micro, stand_ins=self.stand_ins),
            )
        return known

    def micro_batches(self, windows: Iterator[Window], first_micro: int) -> Iterator[MicroBatch]:
        """This rank's micro-batches of the windows; the first window from `first_micro` on."""
        known = num_micro = -1
        parts: list[Part] = []
        for batch, position, size, order, start in windows:
            if size != known:
                known, (num_micro, parts) = size, self.parts(size)
            for part in parts:
                if part.micro >= first_micro:
                    yield MicroBatch(
                        batch,
                        part.micro,
                        num_micro,
                        part.num_samples,
                        size,
                        position + part.start,
                        order,
                        start + part.start,
                        start + part.stop,
                    )
            first_micro = 0
