"""How are gradients of ranks on one host added up? Each rank copies its own into shared memory and reads the others'.

Buckets come one after the other while the backward goes on; nobody waits before the last one. Then, once:

    small    write mine | all have written | add all ranks' values, in rank order, into the bucket
    large    write mine | all have written | add up my part of it, in rank order | all have added | copy the other parts

The second way reads less (each value is added once, not once per rank) and waits twice; with two ranks the first is never slower.
Every value is the sum in rank order, divided by the number of ranks, so all ranks have the same bits. Half precision is added in
float32. Memory has two halves used in turn: who writes into one again has seen that all others have left it.
"""

from __future__ import annotations

from mmap import mmap

import torch
from torch.futures import Future

from allranks.comm.memory.waiting import LINE_BYTES, Counters

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
ALIGN = 64
SMALL_BYTES = (
    64 << 10
)  # up to here a second wait costs more than reading everything: docs/design/shared-memory.md
_MAX_KNOWN = 4096


class MemorySum:
    """The mean of tensors over the ranks of a host, through `memory`. **Collective**: same tensors in the same order on all ranks.

    Args:
        memory: Shared; laid out as a line per rank, then two halves of `half_bytes` per rank.
        counters: Over the same memory.
        half_bytes: Room for the buckets between two waits; a multiple of ALIGN.
    """

    def __init__(self, memory: mmap, counters: Counters, half_bytes: int) -> None:
        self.memory, self.counters, self.half_bytes = memory, counters, half_bytes
        self.rank, self.world_size = counters.rank, len(counters.others) + 1
        self.issued = [0]  # tensors so far: what DDP's all-reduces would have counted in the group
        self._turn = self._used = self._posted = 0
        self._open: list[_Part] = []
        self._futures: list[tuple[Future[torch.Tensor], torch.Tensor]] = []
        self._known: dict[tuple[int, int, int, torch.dtype], list[torch.Tensor]] = {}

    def add(self, tensor: torch.Tensor, is_last: bool) -> Future[torch.Tensor]:
        """Begin to average `tensor` (1-d, contiguous, on a CPU) in place; blocks for the others only if `is_last`.

        Raises:
            CommError: AR050 a rank is gone, AR051 the time is over. The tensors since the last wait are as this rank gave them, or partly
                averaged.
        """
        self.issued[0] += 1
        future: Future[torch.Tensor] = Future()
        self._futures.append((future, tensor))
        self._write(tensor)
        if is_last:
            self._finish()
            futures, self._futures = self._futures, []
            for ready, value in futures:
                ready.set_result(value)
        return future

    def _write(self, tensor: torch.Tensor) -> None:
        size = tensor.element_size()
        start, left = 0, tensor.numel()
        while left:
            if self.half_bytes - self._used < min(left * size, ALIGN):
                self._finish()
            count = min(left, (self.half_bytes - self._used) // size)
            mine = tensor if count == tensor.numel() else tensor[start : start + count]
            slots = self._slots(self._turn, self._used, count, tensor.dtype)
            part = _Part(mine, slots, self.rank, self.world_size)
            part.write()
            self._open.append(part)
            self._used += -(-count * size // ALIGN) * ALIGN
            start, left = start + count, left - count

    def _finish(self) -> None:
        """Wait for the others, and put the means into the tensors written since the last time."""
        parts, self._open = self._open, []
        counters = self.counters
        self._posted += 1
        counters.post(self._posted)
        counters.wait_all(self._posted)
        shared = [part for part in parts if part.is_shared]
        for part in parts:
            part.add_up()
        if shared:
            self._posted += 1
            counters.post(self._posted)
            counters.wait_all(self._posted)
            for part in shared:
                part.collect()
        self._turn, self._used = 1 - self._turn, 0

    def _slots(self, turn: int, offset: int, count: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """Every rank's copy of these `count` values; the same ones come in every step."""
        key = (turn, offset, count, dtype)
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            begin = self.world_size * LINE_BYTES + offset
            places = [begin + (2 * rank + turn) * self.half_bytes for rank in range(self.world_size)]
            found = self._known[key] = [
                torch.frombuffer(self.memory, dtype=dtype, count=count, offset=place) for place in places
            ]
        return found


class _Part:
    """One tensor, or a piece of one, on its way."""

    __slots__ = ("is_shared", "rank", "slots", "tensor", "world_size")

    def __init__(self, tensor: torch.Tensor, slots: list[torch.Tensor], rank: int, world_size: int) -> None:
        self.tensor, self.slots, self.rank, self.world_size = tensor, slots, rank, world_size
        self.is_shared = world_size > 2 and tensor.numel() * tensor.element_size() > SMALL_BYTES

    def _bounds(self, rank: int) -> tuple[int, int]:
        count, size = self.tensor.numel(), self.world_size
        return count * rank // size, count * (rank + 1) // size

    def write(self) -> None:
        """What others will read of this rank's values: all, or all but the part that it adds up itself."""
        mine, tensor = self.slots[self.rank], self.tensor
        if not self.is_shared:
            mine.copy_(tensor)
            return
        low, high = self._bounds(self.rank)
        mine[:low].copy_(tensor[:low])
        mine[high:].copy_(tensor[high:])

    def add_up(self) -> None:
        """The mean into the tensor; of a large one only this rank's part, which goes into its slot for the others, too."""
        if not self.is_shared:
            _mean(self.tensor, self.slots, self.rank)
            return
        low, high = self._bounds(self.rank)
        mine = self.tensor[low:high]
        parts = [slot[low:high] for slot in self.slots]
        into, parts[self.rank] = parts[self.rank], mine
        _mean(mine, parts, self.rank)
        into.copy_(mine)

    def collect(self) -> None:
        """The other parts, from the ranks that added them up."""
        for rank, slot in enumerate(self.slots):
            if rank != self.rank:
                low, high = self._bounds(rank)
                self.tensor[low:high].copy_(slot[low:high])


def _mean(mine: torch.Tensor, slots: list[torch.Tensor], rank: int) -> None:
    """mine = (slots[0] + slots[1] + ...) / their number, added in this order; `mine` holds what slots[rank] does."""
    if mine.dtype in (torch.float16, torch.bfloat16):
        total = slots[0].float()
        for slot in slots[1:]:
            total.add_(slot)
        mine.copy_(total.div_(len(slots)))
        return
    # Two numbers may be added in either order.
    total = mine.add_(slots[1 - rank]) if rank < 2 else slots[0] + slots[1]
    for slot in slots[2:]:
        total.add_(slot)
    torch.div(total, len(slots), out=mine)
