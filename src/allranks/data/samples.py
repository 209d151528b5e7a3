"""How is a micro-batch of a map-style data set read: in this process or in loader workers, with which random numbers?

torch's DataLoader does the work. What it sees as data set is a `SampleReader`, what it sees as batch sampler yields one
request per micro-batch: (indices, position in the global order, seed of the epoch). The reader seeds the generators
for each sample from its position, so augmentation does not depend on ranks or workers, and needs no saved state.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, get_worker_info

from allranks.data.batch import MicroBatch
from allranks.data.randomness import KeptRandomness, draw_one, mix, seed_all
from allranks.data.wanted import LoaderSettings
from allranks.data.worker_life import WorkerStart
from allranks.data.worker_pool import WorkerPool

Request = tuple[list[Any], int, int]
_COLLATE = 0x636F6C6C
_UNTOUCHED = 0x756E746F


class SampleReader:
    """The data set as the DataLoader sees it: takes a request, gives a finished batch.

    A data set with __getitems__ reads the batch at once and is seeded once per micro-batch.
    """

    def __init__(self, dataset: Any, collate_fn: Callable[[list[Any]], Any], *, is_seeded: bool) -> None:
        self.dataset, self.collate_fn, self.is_seeded = dataset, collate_fn, is_seeded
        self._draws: bool | None = None  # whether reading a sample draws random numbers; None: not known yet
        self._next_if_untouched: tuple[float, float, float | None] | None = None

    def __getitems__(self, request: Request) -> Any:
        if not self.is_seeded:
            return self._read(request)
        if get_worker_info() is not None:  # a worker's generators belong to us
            return self._read(request)
        with KeptRandomness():
            return self._read(request)

    def _read(self, request: Request) -> Any:
        indices, position, seed = request
        fetch_many = getattr(self.dataset, "__getitems__", None)
        if not self.is_seeded:
            samples = fetch_many(indices) if fetch_many else [self.dataset[index] for index in indices]
            return self.collate_fn(samples)
        if fetch_many:
            seed_all(mix(seed, position))
            samples = fetch_many(indices)
        else:
            samples = self._read_each(indices, position, seed)
        seed_all(mix(seed, position, _COLLATE))
        return self.collate_fn(samples)

    def _read_each(self, indices: list[Any], position: int, seed: int) -> list[Any]:
        """Read samples, each with the random numbers of its position.

        Seeding costs 12 microseconds a sample, more than many data sets in memory need to read one. A data set that
        drew nothing in its first micro-batch is therefore seeded once per micro-batch, with a fixed seed, and looked at
        afterwards: while nobody draws, the samples are the same. If one did, they are read again, each seeded.
        """
        if self._draws is False:
            seed_all(_UNTOUCHED)
            samples = [self.dataset[index] for index in indices]
            if draw_one() == self._next_if_untouched:
                return samples
            self._draws = True
        if self._draws is None:
            return self._read_first(indices, position, seed)
        samples = []
        for offset, index in enumerate(indices):
            seed_all(mix(seed, position + offset))
            samples.append(self.dataset[index])
        return samples

    def _read_first(self, indices: list[Any], position: int, seed: int) -> list[Any]:
        """The first micro-batch in this process: also find out whether the data set draws random numbers."""
        samples, draws = [], False
        for offset, index in enumerate(indices):
            of_sample = mix(seed, position + offset)
            seed_all(of_sample)
            untouched = draw_one()
            seed_all(of_sample)
            samples.append(self.dataset[index])
            draws = draws or draw_one() != untouched
        self._draws = draws
        seed_all(_UNTOUCHED)
        self._next_if_untouched = draw_one()
        return samples


class _Requests:
    """The batch sampler the DataLoader sees: one request for each micro-batch of the plan of the present epoch.

    The DataLoader asks ahead of what it delivers, but delivers in order: `asked` keeps what belongs to each batch.
    """

    def __init__(self) -> None:
        self.plan: Iterable[MicroBatch] = ()
        self.seed = 0
        self.asked: deque[MicroBatch] = deque()

    def __iter__(self) -> Iterator[Request]:
        for each in self.plan:
            self.asked.append(each)
            yield each.indices_to_load(), each.position, self.seed


def as_it_is(batch: Any) -> Any:
    """The collate function the DataLoader sees: the batch is finished already."""
    return batch


class SampleEngine:
    """Reads a map-style data set through a DataLoader."""

    def __init__(self, dataset: Any, settings: LoaderSettings, *, rank: int, is_seeded: bool) -> None:
        self._requests = _Requests()
        self._generator = torch.Generator()
        self._rank = rank
        self._dataset = SampleReader(dataset, settings.collate_fn, is_seeded=is_seeded)
        loader: DataLoader[Any] = DataLoader(
            self._dataset,  # pyright: ignore[reportArgumentType]
            batch_sampler=self._requests,  # pyright: ignore[reportArgumentType]
            collate_fn=as_it_is,
            generator=self._generator,
            worker_init_fn=WorkerStart(dataset, settings.worker_init_fn) if settings.num_workers else None,
            **settings.torch_arguments(),
        )
        self._pool = WorkerPool(loader, stay=settings.persistent_workers)

    def batches(self, plan: Iterable[MicroBatch], seed: int) -> Iterator[tuple[MicroBatch, Any]]:
        """The micro-batches of a plan with their data, in order."""
        requests = self._requests
        requests.plan, requests.seed = plan, seed
        requests.asked.clear()
        # The DataLoader draws its workers' seed from this generator, not from the user's.
        self._generator.manual_seed(mix(seed, self._rank))
        asked = requests.asked
        with self._pool.epoch() as source:
            for data in source:
                yield asked.popleft(), data

    def close(self) -> None:
        """End the loader workers."""
        self._pool.stop()
