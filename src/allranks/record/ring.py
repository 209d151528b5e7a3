"""Which collectives has this process entered? A ring of the last ones, and how many they were."""

from __future__ import annotations

from itertools import count
from time import monotonic_ns

from allranks.record import layout as at
from allranks.record.texts import Texts


class Ring(Texts):
    """The part of the record that has the collectives."""

    __slots__ = ("_slots", "issued")

    def _begin_ring(self) -> None:
        self.issued = 0
        self._slots = count(1)

    def enter_collective(
        self,
        op: int,
        group: int = 0,
        *,
        ranks: int = 0,
        seq: int = -1,
        reduce_op: int = 0,
        root: int = -1,
        dtype: int = 0,
        shape: tuple[int, ...] = (),
        numel: int = 0,
        num_tensors: int = 0,
        line: int = 0,
        thread: int = 0,
        flags: int = 0,
        is_counted: bool = True,
    ) -> int:
        """A call enters a collective; names are numbers from `string`. Returns the slot for its exit."""
        w = self.words
        number = next(self._slots)
        base = at.RING + number % at.NUM_SLOTS * at.SLOT_WORDS
        w[base + at.S_HEAD] = w[base + at.S_TAIL] = 0
        w[base + at.S_GROUP], w[base + at.S_OP], w[base + at.S_REDUCE] = group, op, reduce_op
        w[base + at.S_ROOT], w[base + at.S_DTYPE], w[base + at.S_NUMEL] = root, dtype, numel
        dims = base + at.S_DIMS
        w[base + at.S_NDIM] = len(shape)
        for dim in shape[: at.NUM_DIMS]:
            w[dims] = dim
            dims += 1
        w[base + at.S_LINE], w[base + at.S_THREAD], w[base + at.S_SEQ] = line, thread, seq
        w[base + at.S_RANKS], w[base + at.S_TENSORS], w[base + at.S_STEP] = ranks, num_tensors, w[at.W_STEP]
        w[base + at.S_FLAGS], w[base + at.S_EXITED] = flags, 0
        w[base + at.S_ENTERED] = monotonic_ns()
        w[base + at.S_TAIL] = number
        w[base + at.S_HEAD] = number
        if is_counted:  # sends, receives and waits are not what all ranks must have done equally often
            w[at.W_ISSUED] = self.issued = self.issued + 1
        return base

    def exit_collective(self, slot: int, flags: int = 0) -> None:
        """The call of `slot` came back."""
        w = self.words
        if flags:
            w[slot + at.S_FLAGS] |= flags
        w[slot + at.S_EXITED] = monotonic_ns()
