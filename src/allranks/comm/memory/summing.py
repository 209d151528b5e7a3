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
from typing import NamedTuple

import torch
from torch.futures import Future

from allranks.comm.memory.waiting import LINE_BYTES, Counters

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
ALIGN = 64
SMALL_BYTES = (
    64 << 10
)  # up to here a second wait costs more than reading everything: docs/design/shared-memory.md


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
        self._turn = self._used = self._posted = self._number = 0
        self._open: list[Part] = []
        # A tensor that comes again at the same place needs nothing new: by half, and number since the last wait.
        self._known: dict[tuple[int, int], Known] = {}

    def add(self, tensor: torch.Tensor, is_last: bool) -> Future[torch.Tensor]:
        """Begin to average `tensor` (1-d, contiguous, on a CPU) in place; blocks for the others only if `is_last`.

        The future is complete from the beginning, so that it can be kept: what is in the tensor counts once the last call is back.

        Raises:
            CommError: AR050 a rank is gone, AR051 the time is over. The tensors since the last wait are as this rank gave them, or partly
                averaged.
        """
        self.issued[0] += 1
        known = self._known.get((self._turn, self._number))
        if known is not None and known.tensor is tensor and known.used == self._used:
            known.part.write()
            self._open.append(known.part)
            self._used += known.part.room
            future = known.future
        else:
            future = self._write(tensor)
        self._number += 1
        if is_last:
            self._finish()
        return future

    def _write(self, tensor: torch.Tensor) -> Future[torch.Tensor]:
        """As the quick way of `add`, for what comes for the first time, or does not fit into what is left of the half."""
        size = tensor.element_size()
        start, left = 0, tensor.numel()
        future: Future[torch.Tensor] = Future()
        future.set_result(tensor)
        while left:
            if self.half_bytes - self._used < min(left * size, ALIGN):
                self._finish()
            count = min(left, (self.half_bytes - self._used) // size)
            is_whole = count == tensor.numel()
            mine = tensor if is_whole else tensor[start : start + count]
            part = Part(mine, self._slots(self._turn, self._used, count, tensor.dtype), self.rank)
            if is_whole:  # takes the place of a bucket that DDP has replaced
                self._known[self._turn, self._number] = Known(tensor, self._used, part, future)
            part.write()
            self._open.append(part)
            self._used += part.room
            start, left = start + count, left - count
        return future

    @property
    def turn(self) -> int:
        """The half that is written next."""
        return self._turn

    def parts_of(self, turn: int, tensors: list[torch.Tensor]) -> list[Part] | None:
        """What went last through a half: the parts of `tensors`, if it was those, each as a whole."""
        if (turn, len(tensors)) in self._known:
            return None
        found = [self._known.get((turn, number)) for number in range(len(tensors))]
        parts = [k.part for k, t in zip(found, tensors, strict=True) if k is not None and k.tensor is t]
        return parts if len(parts) == len(tensors) else None

    def finish(self, parts: list[Part]) -> None:
        """What `add` does for the last of some tensors, where all that it would have written has been written to `parts`. **Collective**.

        Args:
            parts: Of this turn, from `parts_of`.
        """
        self.issued[0] += len(parts)
        self._open, self._number = parts, len(parts)
        self._finish()

    def _finish(self) -> None:
        """Wait for the others, and put the means into the tensors written since the last time."""
        parts, counters = self._open, self.counters
        self._open = []
        self._posted += 1
        counters.post(self._posted)
        counters.wait_all(self._posted)
        are_shared = False
        for part in parts:
            part.add_up()
            are_shared = are_shared or part.is_shared
        if are_shared:
            self._posted += 1
            counters.post(self._posted)
            counters.wait_all(self._posted)
            for part in parts:
                if part.is_shared:
                    part.collect()
        if (self._turn, self._number) in self._known:  # there were more of them once
            old = [key for key in self._known if key[0] == self._turn and key[1] >= self._number]
            for key in old:
                del self._known[key]
        self._turn, self._used, self._number = 1 - self._turn, 0, 0

    def _slots(self, turn: int, offset: int, count: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """Every rank's copy of these `count` values."""
        begin = self.world_size * LINE_BYTES + offset
        places = [begin + (2 * rank + turn) * self.half_bytes for rank in range(self.world_size)]
        return [torch.frombuffer(self.memory, dtype=dtype, count=count, offset=place) for place in places]


class Known(NamedTuple):
    """What was made for a tensor when it came for the first time."""

    tensor: torch.Tensor
    used: int
    part: Part
    future: Future[torch.Tensor]


class Part:
    """One tensor, or a piece of one, on its way; all that its steps need is made once."""

    def __init__(self, tensor: torch.Tensor, slots: list[torch.Tensor], rank: int) -> None:
        size, count = len(slots), tensor.numel()
        num_bytes = count * tensor.element_size()
        self.tensor, self.mine = tensor, slots[rank]
        self.room = -(-num_bytes // ALIGN) * ALIGN
        self.is_shared = size > 2 and num_bytes > SMALL_BYTES
        bounds = [(count * r // size, count * (r + 1) // size) for r in range(size)]
        low, high = bounds[rank]
        self.outside = [(tensor[a:b], self.mine[a:b]) for a, b in ((0, low), (high, count))]
        self.others = [(tensor[a:b], slots[r][a:b]) for r, (a, b) in enumerate(bounds) if r != rank]
        self.own = self.mine[low:high]
        if self.is_shared:  # what is added up here: this rank's values are read from the tensor itself
            self.into = tensor[low:high]
            self.terms = [self.into if r == rank else slot[low:high] for r, slot in enumerate(slots)]
        else:
            self.into, self.terms = tensor, slots
        # Half precision, and sums whose first terms are not the ones that `into` holds, need room of their own.
        is_half = tensor.dtype in (torch.float16, torch.bfloat16)
        is_apart = is_half or (self.is_shared and rank > 1)
        wide = torch.float32 if is_half else tensor.dtype
        self.total = torch.empty(self.into.numel(), dtype=wide) if is_apart else self.into
        self.is_half = is_half
        # With 2, 4, 8 ... ranks every value can be divided before it is added: exact, and one pass less. DDP does so, too.
        self.is_scaled = not is_half and not self.is_shared and size & (size - 1) == 0
        self.scale, self.size = 1.0 / size, size

    def write(self) -> None:
        """What others will read of this rank's values: all, or all but the part that it adds up itself."""
        if self.is_scaled:
            torch.mul(self.tensor, self.scale, out=self.mine)
        elif not self.is_shared:
            self.mine.copy_(self.tensor)
        else:
            for values, slot in self.outside:
                slot.copy_(values)

    def write_of(self, values: torch.Tensor) -> None:
        """The same, of values (1-d) that are not in the tensor; a large one gets them, since its own part is read from there."""
        if self.is_scaled:
            torch.mul(values, self.scale, out=self.mine)
        elif not self.is_shared:
            self.mine.copy_(values)
        else:
            self.tensor.copy_(values)
            self.write()

    def add_up(self) -> None:
        """The mean into the tensor; of a large one only this rank's part, which goes into its slot for the others, too."""
        terms, total = self.terms, self.total
        if self.is_half:
            total.copy_(terms[0])
            total.add_(terms[1])
        else:
            torch.add(terms[0], terms[1], out=total)
        for term in terms[2:]:
            total.add_(term)
        if not self.is_scaled:
            total.div_(self.size)
        if total is not self.into:
            self.into.copy_(total)
        if self.is_shared:
            self.own.copy_(self.into)

    def collect(self) -> None:
        """The other parts, from the ranks that added them up."""
        for values, slot in self.others:
            values.copy_(slot)
