"""Where do the micro-batches of a map-style data set come from? An order, a plan that divides it, an engine that reads."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch

from allranks.data.batch import MicroBatch
from allranks.data.order import Order, WholeOrder, Window
from allranks.data.plan import Plan
from allranks.data.position import Position
from allranks.data.randomness import mix


class Engine(Protocol):
    """What reads the samples of a plan."""

    def batches(self, plan: Iterable[MicroBatch], seed: int) -> Iterator[tuple[MicroBatch, Any]]:
        """Each micro-batch of the plan with its data."""
        ...

    def close(self) -> None:
        """End what runs in the background."""
        ...


class MapSource:
    """The micro-batches of one rank from a data set with indices."""

    def __init__(self, order: Order, plan: Plan, engine: Engine, *, seed: int) -> None:
        self.order, self.plan, self.engine, self.seed = order, plan, engine, seed
        self.num_samples: int | None = order.num_samples()
        self.fingerprint: int | None = None
        self.follows_from_seed = isinstance(order, WholeOrder)

    def num_batches(self) -> int | None:
        """Global batches of an epoch."""
        return self.order.num_batches()

    def num_micro_batches(self) -> int | None:
        """Micro-batches of an epoch for this rank; None where the sizes of the batches are not known ahead."""
        size, total = self.plan.global_batch_size, self.num_batches()
        if size is None or total is None:
            return None
        rest = 0 if self.order.drop_last else (self.order.num_samples() or 0) % size
        full = total - (rest > 0)
        count = full * len(self.plan.parts(size)[1]) if full else 0
        return count + (len(self.plan.parts(rest)[1]) if rest else 0)

    def reseed(self, seed: int) -> None:
        """Go on with another seed: that of a saved state."""
        self.seed = self.order.seed = seed

    def micro_batches(self, position: Position, saved: Any) -> Iterator[tuple[MicroBatch, Any]]:
        """The micro-batches with their data, from `position` on. A map-style data set has no state to be `saved`."""
        windows = self.order.windows(position.epoch, position.pass_, position.batch)
        plan = self.plan.micro_batches(self._watched(windows), position.micro)
        return self.engine.batches(plan, mix(self.seed, position.epoch, position.pass_))

    def _watched(self, windows: Iterator[Window]) -> Iterator[Window]:
        self.fingerprint = None
        for window in windows:
            first = window.order[window.start : window.start + window.size]
            listed = first.tolist() if isinstance(first, torch.Tensor) else list(first)
            self.fingerprint = zlib.crc32(repr(listed).encode())
            yield window
            yield from windows

    def close(self) -> None:
        """End the loader workers."""
        self.engine.close()
