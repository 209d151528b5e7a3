"""Which samples of an iterable data set belong to this rank and this loader worker?

    whole   the data set knows nothing of ranks: every worker reads the whole stream and keeps its own; global batch g is
            the g-th B samples of the stream on any number of ranks, its micro-batches go round the workers
    rank    it gives each rank its own part: a rank's workers read that part and take turns
    own     it divides itself over ranks and workers

A `StreamReader` is the data set the DataLoader sees; it yields finished micro-batches.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from itertools import count, islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import IterableDataset, get_worker_info

from allranks.data.division import Division, fingerprint_of
from allranks.data.plan import Plan
from allranks.data.position import Position
from allranks.data.randomness import KeptRandomness, OwnRandomness, mix
from allranks.data.shares import num_micro_of, split
from allranks.data.torch_inside import presented_as_worker

_COLLATE = 0x636F6C6C


class Piece(NamedTuple):
    """One finished micro-batch on its way from a reader to the loop.

    Attributes:
        batch, micro, num_micro, size, start: As in MicroBatch; size 0 where only the rank's own part is known.
        fingerprint: Of the samples of the window, in the first one only.
        next_state: The data set's state for what follows, if it has one.
    """

    batch: int
    micro: int
    num_micro: int
    num_samples: int
    size: int
    start: int
    fingerprint: int | None
    next_state: Any
    data: Any


class StreamReader(IterableDataset[Any]):
    """Reads an iterable data set for one rank.

    Args:
        plan: The rank's plan; for a whole stream it divides global batches, otherwise only its sizes are used.
        division: How the data set divides itself.
        can_save: Whether the data set has state_dict and load_state_dict, to be asked after each window.
    """

    def __init__(
        self,
        dataset: Any,
        collate_fn: Callable[[list[Any]], Any],
        plan: Plan,
        division: Division,
        *,
        seed: int,
        drop_last: bool,
        can_save: bool,
    ) -> None:
        self.dataset, self.collate_fn, self.plan, self.division = dataset, collate_fn, plan, division
        self.seed, self.drop_last, self.can_save = seed, drop_last, can_save
        self.saved: Any = None
        # Persistent workers hold a copy of this object from an earlier epoch: what changes is in shared memory.
        self._control = torch.zeros(4, dtype=torch.int64)

    def share_control(self) -> None:
        """Needed once before workers start that stay for several epochs."""
        self._control.share_memory_()

    def begin_at(self, position: Position) -> None:
        """Say where the next iteration begins, also to workers that run already."""
        self._control.copy_(torch.tensor([position.epoch, position.pass_, position.batch, position.micro]))

    def __iter__(self) -> Iterator[Piece]:
        info = get_worker_info()
        worker, num_workers = (info.id, info.num_workers) if info is not None else (0, 1)
        if self.division == "as workers" and info is not None:
            num_workers //= self.plan.world_size  # WorkerStart shows the workers of all ranks
            worker -= self.plan.rank * num_workers
        epoch, pass_, batch, micro = self._control.tolist()
        seed = mix(self.seed, epoch, pass_)
        if self.division != "whole":
            seed = mix(seed, self.plan.rank, worker if self.division != "rank" else 0)
        source = _Source(self, epoch, mix(seed), worker)
        if self.division == "whole":
            pieces = self._of_whole(source, batch, micro)
            return self._finished(islice(pieces, worker, None, num_workers), seed)
        if self.division == "rank":
            return self._finished(islice(self._of_part(source, 0, 1), worker, None, num_workers), seed)
        return self._finished(self._of_part(source, worker, num_workers), seed)

    def _of_whole(self, source: _Source, first: int, first_micro: int) -> Iterator[Piece]:
        size = self.plan.global_batch_size
        assert size is not None
        state = source.begin(self.saved, skip=first * size)
        for batch in count(first):
            before = state
            samples, state = source.take(size)
            if not samples or (self.drop_last and len(samples) < size):
                return
            num_micro, parts = self.plan.parts(len(samples))
            fingerprint = fingerprint_of(samples) if batch == first else None
            for part in parts:
                if batch > first or part.micro >= first_micro:
                    follows = state if part.micro == num_micro - 1 else before
                    mine = samples[part.start : part.stop]
                    yield Piece(
                        batch, part.micro, num_micro, part.num_samples, len(samples), part.start,
                        fingerprint, follows, mine,
                    )  # fmt: skip

    def _of_part(self, source: _Source, worker: int, num_workers: int) -> Iterator[Piece]:
        """Micro-batches of the rank's own part: every `num_workers`-th of the sizes that a rank's share is made of."""
        sizes = part_sizes(self.plan)
        state = source.begin(self.saved, skip=0)
        is_first = True
        for number in count(worker, num_workers):
            samples, state = source.take(sizes[number % len(sizes)])
            if not samples:
                return
            fingerprint = fingerprint_of(samples) if is_first else None
            yield Piece(0, 0, 0, len(samples), 0, 0, fingerprint, state, samples)
            is_first = False

    def _finished(self, pieces: Iterable[Piece], seed: int) -> Iterator[Piece]:
        for number, piece in enumerate(pieces):
            with KeptRandomness():
                torch.default_generator.manual_seed(mix(seed, piece.batch, piece.start, number, _COLLATE))
                data = self.collate_fn(piece.data)
            yield piece._replace(data=data)


class _Source:
    """An iterator of the data set that has random generators and a saved state of its own."""

    def __init__(self, reader: StreamReader, epoch: int, seed: int, worker: int) -> None:
        self._dataset, self._can_save, self._epoch = reader.dataset, reader.can_save, epoch
        self._box = OwnRandomness(seed)
        self._plan = reader.plan
        self._is_presented = reader.division == "as workers" and get_worker_info() is None
        self._iterator: Iterator[Any] = iter(())

    def begin(self, saved: Any, skip: int) -> Any:
        """Open the data set, and go to where its saved state says or past `skip` samples; its state there."""
        with self._box, self._presented():
            if callable(set_epoch := getattr(self._dataset, "set_epoch", None)):
                set_epoch(self._epoch)
            if saved is not None:
                self._dataset.load_state_dict(saved["data_set"])
            self._iterator = iter(self._dataset)
            if saved is None:
                for _ in islice(self._iterator, skip):
                    pass
        if saved is not None:
            self._box.load(saved["random"])
        return self._state()

    def take(self, size: int) -> tuple[list[Any], Any]:
        """The next samples, and the data set's state after them."""
        with self._box, self._presented():
            samples = list(islice(self._iterator, size))
        return samples, self._state()

    def _presented(self) -> contextlib.AbstractContextManager[None]:
        if not self._is_presented:
            return contextlib.nullcontext()
        return presented_as_worker(self._plan.rank, self._plan.world_size, self._dataset)

    def _state(self) -> Any:
        if not self._can_save:
            return None
        return {"data_set": self._dataset.state_dict(), "random": self._box.save()}


def part_sizes(plan: Plan) -> list[int]:
    """Sizes of the micro-batches that a rank's share of a full global batch is made of, without empty ones."""
    size = plan.global_batch_size
    assert size is not None
    first, last = split(size, plan.world_size, plan.rank)
    num_micro = num_micro_of(size, plan.world_size, plan.micro_size(size))
    parts = (split(last - first, num_micro, micro) for micro in range(num_micro))
    return [stop - start for start, stop in parts if stop > start] or [1]
