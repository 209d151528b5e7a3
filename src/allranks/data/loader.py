"""How does a rank go through its part of a data set, epoch after epoch, and from the middle of one?"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch

from allranks.core.errors import UsageError
from allranks.data.batch import MicroBatch
from allranks.data.order import Order, Window
from allranks.data.position import Layout, Position
from allranks.data.randomness import mix
from allranks.data.shares import Part, micro_batch_size_of, num_micro_of, parts_of
from allranks.data.transfer import on_device

logger = logging.getLogger(__name__)


class Engine(Protocol):
    """What reads the samples of a plan."""

    def batches(self, plan: Any, seed: int) -> Iterator[tuple[MicroBatch, Any]]: ...

    def close(self) -> None: ...


class Plan:
    """Which micro-batches does this rank do for the windows of an order?"""

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        global_batch_size: int | None,
        accumulation_steps: int,
        micro_batch_size: int | None,
        stand_ins: bool,
    ) -> None:
        self.rank, self.world_size, self.stand_ins = rank, world_size, stand_ins
        self.global_batch_size, self.accumulation_steps = global_batch_size, accumulation_steps
        self.micro_batch_size = micro_batch_size
        self._parts: dict[int, tuple[int, list[Part]]] = {}

    def parts(self, size: int) -> tuple[int, list[Part]]:
        """The number of micro-batches of a global batch of `size` samples, and this rank's own."""
        if (known := self._parts.get(size)) is None:
            # A batch sampler's batches differ in size: there each is divided by itself.
            micro = self.micro_batch_size or micro_batch_size_of(
                self.global_batch_size or size, self.world_size, self.accumulation_steps
            )
            known = self._parts[size] = (
                num_micro_of(size, self.world_size, micro),
                parts_of(size, self.rank, self.world_size, micro, stand_ins=self.stand_ins),
            )
        return known

    def micro_batches(self, windows: Iterator[Window], first_micro: int) -> Iterator[MicroBatch]:
        """This rank's micro-batches of the windows; the first window from `first_micro` on."""
        for batch, position, size, order, start in windows:
            num_micro, parts = self.parts(size)
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


class RankLoader:
    """One rank's batches, on its device, with `current` saying what the loop was given last.

    Iterating is **collective** in training in the sense that every rank gets the same number of micro-batches; in
    evaluation no rank waits for another. Each iteration is one epoch; the epoch is `epoch_of()` where that was given,
    otherwise it goes up by itself (or as `set_epoch` says).
    """

    def __init__(
        self,
        *,
        dataset: Any,
        order: Order,
        plan: Plan,
        engine: Engine,
        device: torch.device,
        seed: int,
        is_training: bool,
        epoch_of: Callable[[], int] | None,
        on_batch: Callable[[MicroBatch], None] | None,
        on_end: Callable[[], None] | None,
        name: str,
    ) -> None:
        self.dataset, self.is_training, self.name = dataset, is_training, name
        self.current: MicroBatch | None = None
        self._order, self._plan, self._engine, self._device, self._seed = order, plan, engine, device, seed
        self._epoch_of, self._on_batch, self._on_end = epoch_of, on_batch, on_end
        self._epoch = 0
        self._start = Position()  # of the present iteration
        self._last: MicroBatch | None = None  # handed out last in it
        self._begun: int | None = None  # the epoch of the last iteration
        self._resume: Position | None = None
        self._running: object | None = None

    @property
    def global_batch_size(self) -> int | None:
        """Samples of one update over all ranks; None with a batch sampler."""
        return self._plan.global_batch_size

    @property
    def num_batches(self) -> int | None:
        """Global batches of an epoch; None where the data does not tell."""
        return self._order.num_batches()

    def __len__(self) -> int:
        """Micro-batches that this rank is given in an epoch."""
        total = self._order.num_batches()
        if total is None or self._plan.global_batch_size is None:
            raise TypeError(f"the length of loader {self.name or self.dataset!r} is not known before its end")
        length = getattr(self._order, "length", None)
        full, rest = total, 0
        if length is not None and not self._order.drop_last:  # pyright: ignore[reportAttributeAccessIssue]
            full, rest = divmod(length, self._plan.global_batch_size)
        count = full * len(self._plan.parts(self._plan.global_batch_size)[1]) if full else 0
        return count + (len(self._plan.parts(rest)[1]) if rest else 0)

    def set_epoch(self, epoch: int) -> None:
        """The epoch of the next iteration. Not needed: it goes up by itself, or follows run.epochs."""
        if self._epoch_of is not None:
            raise UsageError(
                "AR147", f"set_epoch({epoch}) on a loader that follows run.epochs", fix="leave set_epoch out"
            )
        self._epoch = epoch

    def _layout(self) -> Layout:
        size = self._plan.global_batch_size
        return Layout(
            seed=self._seed,
            global_batch_size=size,
            num_samples=getattr(self._order, "length", None),
            num_micro=None if size is None else self._plan.parts(size)[0],
            world_size=self._plan.world_size,
        )

    def state_dict(self) -> dict[str, Any]:
        """The position after the batch that was handed out last; the same on every rank, and on any number of ranks.

        At the end of an epoch it is that epoch's end: resumed there, the epoch has no more batches.
        """
        return self._layout().to_state(self._resume or self._next())

    def _next(self) -> Position:
        epoch, pass_, last = self._start.epoch, self._start.pass_, self._last
        if last is None:
            return self._start
        if last.is_last:
            return Position(epoch, pass_, last.batch + 1)
        return Position(epoch, pass_, last.batch, last.micro + 1)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on at a saved position at the next iteration.

        With `epoch_of`, the position counts if the iteration is of the same epoch; otherwise it begins at the start.

        Raises:
            CheckpointError: AR141 the state belongs to another data set or batch size.
        """
        self._resume = self._layout().from_state(state)
        if state["seed"] != self._seed:
            logger.warning(
                "the loader goes on with seed %d of its saved state, not %d", state["seed"], self._seed
            )
            self._seed = state["seed"]
            self._order.reseed(self._seed)
        if self._epoch_of is None:
            self._epoch = self._resume.epoch

    def _enter_epoch(self) -> Position:
        """Decide with what a new iteration begins."""
        epoch = self._epoch if self._epoch_of is None else self._epoch_of()
        resume, self._resume = self._resume, None
        if resume is not None and resume.epoch == epoch:
            start = resume
        else:
            # A second pass within one epoch of run.epochs is shuffled anew.
            again = self._epoch_of is not None and epoch == self._begun
            start = Position(epoch, self._start.pass_ + 1 if again else 0)
        self._epoch = self._begun = epoch
        self._start, self._last = start, None
        return start

    def __iter__(self) -> Iterator[Any]:
        start = self._enter_epoch()
        epoch, pass_ = start.epoch, start.pass_
        running = self._running = object()
        windows = self._order.windows(epoch, pass_, start.batch)
        plan = self._plan.micro_batches(windows, start.micro)
        pairs = on_device(self._engine.batches(plan, mix(self._seed, epoch, pass_)), self._device)
        try:
            for each, data in pairs:
                self.current = self._last = each
                if self._on_batch is not None:
                    self._on_batch(each)
                yield data
                if self._running is not running:
                    raise UsageError(
                        "AR143",
                        "this iteration of the loader goes on after a newer one was begun",
                        fix="one iteration at a time; for a second one, a second run.loader(...)",
                    )
        finally:
            if self._running is running:
                self._leave_epoch()

    def _leave_epoch(self) -> None:
        self._running = self.current = None
        if self._epoch_of is None:
            self._epoch += 1
        if self._on_end is not None:
            self._on_end()

    def close(self) -> None:
        """End the loader workers; the loader can be iterated again afterwards."""
        self._engine.close()
