"""Where do the micro-batches of an iterable data set come from, and when is its epoch over for all ranks?

A stream that every rank reads whole ends for all at once. One that gives each rank its own part may give more batches to
one rank than to another: the ranks tell each other how many samples of the next global batch they have, one batch ahead,
and go on until none has any; a rank without samples takes part with a stand-in. So each sample counts once.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader

from allranks.core.errors import RanksDisagree, UsageError, warn_once
from allranks.data.agree import Exchange, find_exchange
from allranks.data.batch import MicroBatch
from allranks.data.plan import Plan
from allranks.data.position import Position
from allranks.data.randomness import mix
from allranks.data.samples import as_it_is
from allranks.data.shares import ceil_div, num_micro_of, split
from allranks.data.stream_reader import Piece, StreamReader, part_sizes
from allranks.data.wanted import LoaderSettings
from allranks.data.worker_life import WorkerStart
from allranks.data.worker_pool import WorkerPool

logger = logging.getLogger(__name__)


class StreamSource:
    """The micro-batches of one rank from a data set without indices.

    Args:
        is_declared: The user said how the data set is divided; otherwise it was guessed from its code.
    """

    def __init__(
        self,
        reader: StreamReader,
        plan: Plan,
        settings: LoaderSettings,
        *,
        is_declared: bool,
        exchange: Exchange | Literal["auto"] | None,
    ) -> None:
        self.reader, self.plan, self.settings = reader, plan, settings
        self.is_declared = is_declared
        self.exchange: Exchange | Literal["auto"] | None = exchange
        self.fingerprint: int | None = None
        self.follows_from_seed = False
        self.num_samples: int | None = None  # a stream may be longer or shorter than its data set says
        self._generator = torch.Generator()
        if settings.persistent_workers:
            reader.share_control()
        start = WorkerStart(reader.dataset, settings.worker_init_fn, as_one_of=self._as_one_of())
        loader: DataLoader[Any] = DataLoader(
            reader,
            batch_size=None,
            collate_fn=as_it_is,
            generator=self._generator,
            worker_init_fn=start if settings.num_workers else None,
            **settings.torch_arguments(),
        )
        self._pool = WorkerPool(loader, stay=settings.persistent_workers)

    @property
    def is_divided_by_data_set(self) -> bool:
        """Whether each rank's part is the data set's affair, so that a position has a meaning only on as many ranks."""
        return self.reader.division != "whole"

    def _as_one_of(self) -> tuple[int, int] | None:
        return (self.plan.rank, self.plan.world_size) if self.reader.division == "as workers" else None

    def num_batches(self) -> int | None:
        """Global batches, where the data set says its length and every rank reads it whole."""
        size = self.plan.global_batch_size
        if size is None or self.reader.division != "whole" or not hasattr(self.reader.dataset, "__len__"):
            return None
        length = len(self.reader.dataset)
        return length // size if self.reader.drop_last else ceil_div(length, size)

    def num_micro_batches(self) -> int | None:
        """Micro-batches of an epoch for this rank, where the length is known."""
        total, size = self.num_batches(), self.plan.global_batch_size
        if total is None or size is None:
            return None
        rest = 0 if self.reader.drop_last else len(self.reader.dataset) % size
        full = total - (rest > 0)
        return full * len(self.plan.parts(size)[1]) + (len(self.plan.parts(rest)[1]) if rest else 0)

    def reseed(self, seed: int) -> None:
        """Go on with another seed: that of a saved state."""
        self.reader.seed = seed
        self.close()

    def micro_batches(self, position: Position, saved: Any) -> Iterator[tuple[MicroBatch, Any]]:
        """The micro-batches with their data, from `position` on; `saved` is the data set's own state there, if any."""
        if self.reader.division == "whole":
            return self._of_whole(position, saved)
        return self._of_parts(position, saved)

    def _pieces(self, position: Position, saved: Any) -> Iterator[Piece]:
        if saved is not None or self.reader.saved is not None:
            self.close()  # workers that run have no way to hear of it
        self.reader.saved = saved
        self.reader.begin_at(position)
        self._generator.manual_seed(mix(self.reader.seed, position.epoch, position.pass_, self.plan.rank))
        with self._pool.epoch() as source:
            yield from source

    def _of_whole(self, position: Position, saved: Any) -> Iterator[tuple[MicroBatch, Any]]:
        size = self.plan.global_batch_size
        assert size is not None
        self.fingerprint = None
        for piece in self._pieces(position, saved):
            if self.fingerprint is None:
                self.fingerprint = piece.fingerprint
            place = piece.batch * size + piece.start
            yield (
                MicroBatch(
                    piece.batch, piece.micro, piece.num_micro, piece.num_samples, piece.size, place,
                    next_state=piece.next_state,
                ),
                piece.data,
            )  # fmt: skip
        if self.fingerprint is None and position.batch == 0 and self.plan.stand_ins:
            raise self._empty()

    def _of_parts(self, position: Position, saved: Any) -> Iterator[tuple[MicroBatch, Any]]:
        exchange = find_exchange(self.exchange, self.plan.world_size) if self.plan.stand_ins else None
        if self.plan.stand_ins and self.plan.world_size > 1 and exchange is None:
            raise UsageError(
                "AR146",
                "a data set that divides itself cannot be trained on without a process group",
                why="ranks may get different numbers of batches, and have to tell each other when to end",
                fix="torch.distributed.init_process_group before the loop, allranks.start, or sharded=False",
            )
        pieces = self._pieces(position, saved)
        try:
            windows = _windows_of(pieces, len(part_sizes(self.plan)))
            if saved is None:
                # Which worker gave what can only be told by going through it again.
                windows = islice(windows, position.batch, None)
            yield from self._numbered(windows, position, exchange)
        finally:
            pieces.close()  # pyright: ignore[reportAttributeAccessIssue]

    def _numbered(
        self, windows: Iterable[list[Piece]], position: Position, exchange: Exchange | None
    ) -> Iterator[tuple[MicroBatch, Any]]:
        size, rank, world_size = self.plan.global_batch_size, self.plan.rank, self.plan.world_size
        assert size is not None
        num_micro = num_micro_of(size, world_size, self.plan.micro_size(size))
        first, last = split(size, world_size, rank)
        done = position.batch * (last - first)
        stand_in: Any = None
        for batch, (pieces, total) in enumerate(self._agreed(windows, exchange), position.batch):
            first_micro = position.micro if batch == position.batch else 0
            for micro in range(num_micro):
                piece = pieces[micro] if micro < len(pieces) else None
                if piece is not None:
                    stand_in = piece.data
                elif not self.plan.stand_ins:
                    break
                num_samples = piece.num_samples if piece else 0
                follows = pieces[-1].next_state if pieces and micro == num_micro - 1 else None
                if micro >= first_micro:
                    mark = MicroBatch(
                        batch, micro, num_micro, num_samples, total, done * world_size + rank,
                        stride=world_size, next_state=follows,
                    )  # fmt: skip
                    yield mark, stand_in
                done += num_samples

    def _agreed(
        self, windows: Iterable[list[Piece]], exchange: Exchange | None
    ) -> Iterator[tuple[list[Piece], int]]:
        """The windows of this rank with the number of samples that all ranks have in them; asked one window ahead."""
        source = iter(windows)
        if exchange is None:
            alone = self.plan.world_size == 1
            for pieces in source:
                size = sum(p.num_samples for p in pieces)
                if not (self.reader.drop_last and size < sum(part_sizes(self.plan))):
                    yield pieces, size if alone else 0
            return
        ahead = next(source, [])
        self._compare_parts(ahead, exchange)
        wait = exchange(sum(p.num_samples for p in ahead))
        is_first = is_even = True
        while True:
            counts = wait()
            if is_first:
                self._require_samples(counts)
            if not any(counts) or (
                self.reader.drop_last and sum(counts) < (self.plan.global_batch_size or 0)
            ):
                return
            if is_even and 0 in counts:
                is_even = False
                logger.info("rank %d has no more samples; the others go on with theirs", counts.index(0))
            is_first, present = False, ahead
            ahead = next(source, [])
            wait = exchange(sum(p.num_samples for p in ahead))
            yield present, sum(counts)

    def _require_samples(self, counts: list[int]) -> None:
        if not any(counts):
            raise self._empty()
        if 0 in counts:
            rank = counts.index(0)
            raise RanksDisagree(
                "AR142",
                f"the data set {self._name()} has no sample for rank {rank}, but {max(counts)} for rank {counts.index(max(counts))}",
                why="it divides itself, likely by files or shards, and there are fewer of them than ranks",
                fix="at least one shard for each rank, or sharded=False: every rank reads all and takes its share",
            )

    def _compare_parts(self, pieces: list[Piece], exchange: Exchange) -> None:
        """Ranks that all read the same would train on each sample once per rank."""
        mine = pieces[0].fingerprint if pieces else None
        prints = exchange(-1 if mine is None else mine)()
        if len(set(prints)) > 1 or prints[0] == -1:
            return
        text = f"all {len(prints)} ranks read the same samples first of {self._name()}, which is taken to divide itself"
        if self.is_declared:
            warn_once("AR148", f"{text}, as sharded=True says; if it does not, leave sharded out")
            return
        raise RanksDisagree(
            "AR148",
            text,
            why="its code looks at the rank or the worker, but the samples are those of every rank",
            fix="sharded=False: allranks divides it; sharded=True: they only look the same",
        )

    def _empty(self) -> UsageError:
        return UsageError(
            "AR133", f"the iterable data set {self._name()} gave no sample", fix="a data set with samples"
        )

    def _name(self) -> str:
        return type(self.reader.dataset).__name__

    def close(self) -> None:
        """End the loader workers."""
        self._pool.stop()


def _windows_of(pieces: Iterator[Piece], length: int) -> Iterator[list[Piece]]:
    while window := list(islice(pieces, length)):
        yield window
