"""How does a rank go through its part of a data set, epoch after epoch, and from the middle of one?"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, Protocol

import torch

from allranks.core.errors import UsageError, warn_once
from allranks.data.agree import Exchange, SameData, find_exchange
from allranks.data.batch import MicroBatch
from allranks.data.plan import Plan
from allranks.data.position import Layout, Position
from allranks.data.transfer import on_device

logger = logging.getLogger(__name__)

COMPARED_EVERY = 256
"""Micro-batches after which ranks are compared again where all follows from a seed that was the same: an epoch may be as short as 0.1 s."""


class Source(Protocol):
    """Where a rank's micro-batches come from: MapSource or StreamSource."""

    plan: Plan
    num_samples: int | None
    fingerprint: int | None  # of the first global batch of the running iteration, if all ranks have the same
    follows_from_seed: bool  # which samples come, in every epoch, and not from code of the user's

    def num_batches(self) -> int | None: ...
    def num_micro_batches(self) -> int | None: ...
    def reseed(self, seed: int) -> None: ...
    def micro_batches(self, position: Position, saved: Any) -> Iterator[tuple[MicroBatch, Any]]: ...
    def close(self) -> None: ...


class RankLoader:
    """One rank's batches, on its device; `current` says what the loop was given last.

    In training every rank gets the same number of micro-batches; in evaluation each sample comes once and no rank waits
    for another. Each iteration is one epoch. The epoch is `epoch_of()` where that was given; otherwise it goes up by
    itself, or is what `set_epoch` says.

    Attributes:
        dataset: The user's data set.
        is_training: False: for evaluation.
        current: The micro-batch handed out last; None outside an iteration.
        on_batch, on_end: As given to make_loader.
    """

    def __init__(
        self,
        source: Source,
        *,
        dataset: Any,
        device: torch.device,
        seed: int,
        is_training: bool,
        epoch_of: Callable[[], int] | None,
        on_batch: Callable[[MicroBatch], None] | None,
        on_end: Callable[[], None] | None,
        exchange: Exchange | Literal["auto"] | None,
        name: str,
    ) -> None:
        self.dataset, self.is_training, self.name = dataset, is_training, name
        self.current: MicroBatch | None = None
        self.on_taken: Callable[[], None] | None = None
        """Called when the loop comes back for more: all it did with the batch before is done."""
        self._source, self._device, self._seed = source, device, seed
        self._exchange: Exchange | Literal["auto"] | None = exchange
        self._epoch_of, self.on_batch, self.on_end = epoch_of, on_batch, on_end
        self._epoch = 0
        self._begun: Position | None = None  # where the last iteration began that took more than a look
        self._start, self._saved = Position(), None  # where the present iteration began
        self._last: MicroBatch | None = None  # handed out last in it
        self._resume: tuple[Position, Any] | None = None
        self._running: object | None = None
        self._num_begun = 0  # iterations since the loader was made or its state was loaded

    @property
    def global_batch_size(self) -> int | None:
        """Samples of one update over all ranks; None with a batch sampler."""
        return self._source.plan.global_batch_size

    @property
    def num_batches(self) -> int | None:
        """Global batches of an epoch; None where the data does not tell."""
        return self._source.num_batches()

    def __len__(self) -> int:
        """Micro-batches that this rank is given in an epoch."""
        if (length := self._source.num_micro_batches()) is None:
            kind = type(self.dataset).__name__
            raise TypeError(f"the length of the loader of {kind} is not known before its end")
        return length

    def fingerprint(self) -> int | None:
        """A hash of the first global batch's samples of this iteration; the same on all ranks. None before it."""
        return self._source.fingerprint

    def set_epoch(self, epoch: int) -> None:
        """The epoch of the next iteration. Not needed: it goes up by itself, or follows run.epochs.

        Raises:
            UsageError: AR147 the loader follows run.epochs.
        """
        if self._epoch_of is not None:
            raise UsageError(
                "AR147",
                f"set_epoch({epoch}) on a loader that follows run.epochs",
                fix="leave set_epoch out",
            )
        self._epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        """The position after the batch that was handed out last; it means the same on any number of ranks.

        At the end of an epoch it is that epoch's end: resumed there, the epoch has no more batches.
        """
        waiting = self._resume if self._last is None else None
        position, saved = waiting or (self._next(), self._next_state())
        state = self._layout().to_state(position)
        if saved is not None:
            state |= {"data_set": saved, "rank": self._source.plan.rank}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on at a saved position at the next iteration.

        With `epoch_of`, the position counts if the iteration is of the same epoch; otherwise it begins at the start.

        Raises:
            CheckpointError: AR141 the state belongs to another data set or batch size.
        """
        position = self._layout().from_state(state)
        if state["seed"] != self._seed:
            logger.warning("the loader goes on with the seed of its saved state, %d", state["seed"])
            self._seed = state["seed"]
            self._source.reseed(self._seed)
        self._resume, self._last = (position, self._saved_of(state, position)), None
        self._num_begun = 0
        if self._epoch_of is None:
            self._epoch = position.epoch

    def _saved_of(self, state: Mapping[str, Any], position: Position) -> Any:
        """The data set's own state, where it fits this rank; without one the loader skips ahead."""
        plan, saved = self._source.plan, state.get("data_set")
        if not getattr(self._source, "is_divided_by_data_set", False):
            return saved
        if state["world_size"] != plan.world_size and position.batch:
            warn_once(
                "AR149",
                f"the data set {type(self.dataset).__name__} divides itself, and its state is that of {state['world_size']} "
                f"ranks, not {plan.world_size}: it goes on at global batch {position.batch}, but some samples may come twice "
                "or not at all; sharded=False makes the order the same on any number of ranks",
            )
        return saved if (state["world_size"], state.get("rank")) == (plan.world_size, plan.rank) else None

    def _layout(self) -> Layout:
        plan = self._source.plan
        size = plan.global_batch_size
        return Layout(
            seed=self._seed,
            global_batch_size=size,
            num_samples=self._source.num_samples,
            num_micro=None if size is None else plan.parts(size)[0],
            world_size=plan.world_size,
        )

    def _next(self) -> Position:
        epoch, pass_, last = self._start.epoch, self._start.pass_, self._last
        if last is None:
            return self._start
        if last.is_last:
            return Position(epoch, pass_, last.batch + 1)
        return Position(epoch, pass_, last.batch, last.micro + 1)

    def _next_state(self) -> Any:
        return self._saved if self._last is None else self._last.next_state

    def _enter_epoch(self) -> tuple[Position, Any]:
        """With what a new iteration begins."""
        epoch = self._epoch if self._epoch_of is None else self._epoch_of()
        if self._resume is not None and self._resume[0].epoch == epoch:
            return self._resume
        # A second pass within one epoch of run.epochs is shuffled anew.
        begun = self._begun
        again = self._epoch_of is not None and begun is not None and begun.epoch == epoch
        return Position(epoch, begun.pass_ + 1 if begun is not None and again else 0), None

    def __iter__(self) -> Iterator[Any]:
        start, saved = self._start, self._saved = self._enter_epoch()
        self._last = None
        running = self._running = object()
        pairs = on_device(self._source.micro_batches(start, saved), self._device)
        comparison: SameData | None = None
        has_begun = False
        try:
            for each, data in pairs:
                self.current = self._last = each
                if self.on_batch is not None:
                    self.on_batch(each)
                yield data
                if comparison is not None:
                    comparison = comparison.finish()
                elif not has_begun:
                    has_begun, comparison = True, self._begin(start)
                if self._running is not running:
                    raise UsageError(
                        "AR143",
                        "this iteration of the loader goes on after a newer one was begun",
                        fix="one iteration at a time; for a second one at once, a second loader",
                    )
                if self.on_taken is not None:
                    self.on_taken()
            if not has_begun:
                has_begun = True
                self._begun, self._resume = start, None
            if comparison is not None:
                comparison.finish()
        finally:
            if self._running is running:
                self._leave_epoch(has_begun)

    def _begin(self, start: Position) -> SameData | None:
        """Count the iteration, since the loop came back for a second batch.

        Who only looks at a first batch, maybe on one rank, changes no later iteration and waits for nobody.
        """
        self._begun, self._resume = start, None
        return self._compare(start)

    def _compare(self, start: Position) -> SameData | None:
        """Begin to compare with the other ranks what this epoch goes through."""
        exchange = find_exchange(self._exchange, self._source.plan.world_size) if self.is_training else None
        if exchange is None or not self._is_compared_now():
            return None
        return SameData(
            exchange,
            {
                "the number of samples": self._source.num_samples,
                "global_batch_size": self.global_batch_size,
                "the number of global batches": self.num_batches,
                "the number of micro-batches in a window": self._layout().num_micro,
                "the seed": self._seed,
                "the epoch": start.epoch,
                "the first global batch": start.batch,
                "the first micro-batch": start.micro,
                "the pass": start.pass_,
                "samples of the first batch": self._source.fingerprint,
            },
            self.name,
        )

    def _is_compared_now(self) -> bool:
        """Each time, but for short epochs that follow from a seed which was the same twice; the same answer on ranks that agree so far."""
        self._num_begun += 1
        length = self._source.num_micro_batches() if self._source.follows_from_seed else None
        every = COMPARED_EVERY // length if length else 1
        return self._num_begun <= 2 or every <= 1 or self._num_begun % every == 0

    def _leave_epoch(self, has_begun: bool) -> None:
        self._running = self.current = None
        if self._epoch_of is None and has_begun:
            self._epoch = self._start.epoch + 1
        if self.on_end is not None:
            self.on_end()

    def close(self) -> None:
        """End the loader workers; the loader can be iterated again afterwards."""
        self._source.close()
