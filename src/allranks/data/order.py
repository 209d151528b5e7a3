"""Which sample stands where in an epoch, on all ranks alike?

    Shuffled / Sequential    known as a whole: any global batch can be begun with
    SamplerOrder             a user's sampler (weighted, custom, infinite), enumerated alike on every rank
    BatchSamplerOrder        a user's batch sampler: each of its batches is a global batch

Every order gives windows: the slices that are the global batches, from batch `start` on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple, Protocol

import torch

from allranks.data.randomness import OwnRandomness, mix

# torch's own samplers that draw all their numbers at once and do not depend on the rank: listing them costs once.
_WHOLE_AT_ONCE = (torch.utils.data.WeightedRandomSampler, torch.utils.data.SubsetRandomSampler)


class Window(NamedTuple):
    """The samples of one global batch: `order[start : start + size]`, which stand at `position` in the epoch."""

    batch: int
    position: int
    size: int
    order: Any
    start: int


class Order(Protocol):
    """The order of an epoch; the same on every rank."""

    seed: int
    drop_last: bool

    def num_samples(self) -> int | None:
        """Samples of an epoch, None if that is not known before its end."""
        ...

    def num_batches(self) -> int | None:
        """Global batches of an epoch, None if that is not known before its end."""
        ...

    def windows(self, epoch: int, pass_: int, start: int) -> Iterator[Window]:
        """The global batches of the epoch from `start` on, the same on every rank."""
        ...


class WholeOrder:
    """The data set in its own order, or in one permutation per epoch.

    Args:
        seed: The same on all ranks; the permutation is torch.randperm of a generator of its own.
    """

    def __init__(
        self, length: int, batch_size: int, *, seed: int, is_shuffled: bool, drop_last: bool
    ) -> None:
        self.length, self.batch_size, self.seed = length, batch_size, seed
        self.is_shuffled, self.drop_last = is_shuffled, drop_last

    def num_samples(self) -> int:
        return self.length

    def num_batches(self) -> int:
        return self.length // self.batch_size if self.drop_last else -(-self.length // self.batch_size)

    def windows(self, epoch: int, pass_: int, start: int) -> Iterator[Window]:
        order = permutation(self.length, self.seed, epoch, pass_) if self.is_shuffled else range(self.length)
        for batch in range(start, self.num_batches()):
            first = batch * self.batch_size
            yield Window(batch, first, min(self.batch_size, self.length - first), order, first)


def permutation(length: int, seed: int, epoch: int, pass_: int = 0) -> torch.Tensor:  # (length,), int64
    """The order of a shuffled epoch, from (seed, epoch) alone."""
    generator = torch.Generator()
    generator.manual_seed(mix(seed, epoch, pass_))
    return torch.randperm(length, generator=generator)


class SamplerOrder:
    """A user's sampler, enumerated on every rank under generators seeded from (seed, epoch)."""

    def __init__(self, sampler: Iterable[Any], batch_size: int, *, seed: int, drop_last: bool) -> None:
        self.sampler, self.batch_size, self.drop_last = sampler, batch_size, drop_last
        self.seed, self.own_seed = seed, _own_seed(sampler)

    def num_samples(self) -> int | None:
        return _length_of(self.sampler)

    def num_batches(self) -> int | None:
        length = self.num_samples()
        if length is None:
            return None
        return length // self.batch_size if self.drop_last else -(-length // self.batch_size)

    def windows(self, epoch: int, pass_: int, start: int) -> Iterator[Window]:
        seed = mix(self.seed, self.own_seed, epoch, pass_)
        for batch, order in enumerate(_drawn(self.sampler, self.batch_size, seed, epoch)):
            if self.drop_last and len(order) < self.batch_size:
                return
            if batch >= start:
                yield Window(batch, batch * self.batch_size, len(order), order, 0)


class BatchSamplerOrder:
    """A user's batch sampler; its batches may differ in size."""

    def __init__(self, batch_sampler: Iterable[Any], *, seed: int) -> None:
        self.batch_sampler = batch_sampler
        self.seed, self.drop_last = seed, False
        self.own_seed = mix(_own_seed(batch_sampler), _own_seed(getattr(batch_sampler, "sampler", None)))

    def num_samples(self) -> None:
        return None

    def num_batches(self) -> int | None:
        return _length_of(self.batch_sampler)

    def windows(self, epoch: int, pass_: int, start: int) -> Iterator[Window]:
        position = batch = 0
        for (order,) in _drawn(self.batch_sampler, 1, mix(self.seed, self.own_seed, epoch, pass_), epoch):
            order = list(order)
            if not order:
                continue
            if batch >= start:
                yield Window(batch, position, len(order), order, 0)
            batch, position = batch + 1, position + len(order)


def _drawn(sampler: Iterable[Any], size: int, seed: int, epoch: int) -> Iterator[list[Any]]:
    """What a sampler gives, `size` at a time, with the global generators and its own seeded alike on every rank."""
    for each in (sampler, getattr(sampler, "sampler", None)):
        if callable(set_epoch := getattr(each, "set_epoch", None)):
            set_epoch(epoch)
        if isinstance(generator := getattr(each, "generator", None), torch.Generator):
            generator.manual_seed(seed)
    box = OwnRandomness(seed)
    with box:
        source = iter(list(sampler)) if type(sampler) in _WHOLE_AT_ONCE else iter(sampler)
    if type(sampler) in _WHOLE_AT_ONCE:
        while drawn := list(islice(source, size)):
            yield drawn
        return
    while True:
        # Only one batch ahead: a sampler may be infinite, or learn from the loop while it is read.
        with box:
            drawn = list(islice(source, size))
        if not drawn:
            return
        yield drawn


def _own_seed(sampler: Any) -> int:
    """The seed of a sampler's own generator as the user made it, 0 if it has none."""
    generator = getattr(sampler, "generator", None)
    return generator.initial_seed() if isinstance(generator, torch.Generator) else 0


def _length_of(sampler: Any) -> int | None:
    try:
        return len(sampler)
    except TypeError:
        return None
