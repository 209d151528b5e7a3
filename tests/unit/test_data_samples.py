"""Do samplers, augmentation and the fast path give the same samples on any number of ranks and workers?"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    RandomSampler,
    Sampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

from allranks.data import RankLoader, make_loader
from support.sequences import Numbers, global_batches, see, tensors

pytestmark = pytest.mark.filterwarnings("ignore:AR134")


@pytest.mark.parametrize("dataset", ["tensors", "subset", "nested"])
def test_fast_path_when_compared_with_torchs_loader_gives_the_same_batches(dataset: str) -> None:
    base = TensorDataset(torch.randn(30, 3), torch.arange(30))
    data: Any = {
        "tensors": base,
        "subset": Subset(base, [4, 2, 28, 9, 11, 0, 7]),
        "nested": Subset(Subset(base, range(20, 0, -1)), [4, 2, 19, 9]),
    }[dataset]
    ours = list(make_loader(data, global_batch_size=4))
    theirs = list(DataLoader(data, batch_size=4))
    assert [type(x) for x in ours] == [type(x) for x in theirs] == [list] * len(ours)
    for a, b in zip(ours, theirs, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    shuffled = make_loader(data, global_batch_size=4, shuffle=True)
    for x, y in shuffled:
        assert shuffled.current is not None
        expected = [data[i] for i in shuffled.current.indices or []]
        assert torch.equal(x, torch.stack([e[0] for e in expected]))
        assert torch.equal(y, torch.stack([e[1] for e in expected]))


def test_fast_path_when_the_loop_changes_its_batch_leaves_the_data_set_alone() -> None:
    data = TensorDataset(torch.zeros(8, 2))
    for kwargs in ({"shuffle": True}, {"train": True}):
        for (x,) in make_loader(data, global_batch_size=4, **kwargs):
            x.add_(1)
    assert data.tensors[0].sum() == 0


class Cycling(Sampler[int]):
    """Infinite, and random by three generators."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        while True:
            yield (
                random.randrange(self.length)
                + np.random.randint(self.length)
                + int(torch.randint(self.length, ()))
            ) % self.length


@pytest.mark.parametrize("kind", ["weighted", "infinite", "own generator", "subset"])
def test_samplers_when_enumerated_on_each_rank_give_one_sequence(kind: str) -> None:
    def sampler() -> Any:
        return {
            "weighted": WeightedRandomSampler([1.0] * 30, 40),
            "infinite": Cycling(30),
            "own generator": RandomSampler(
                range(30), replacement=True, num_samples=40, generator=torch.Generator().manual_seed(7)
            ),
            "subset": torch.utils.data.SubsetRandomSampler(range(0, 30, 2)),
        }[kind]

    def joined(world_size: int) -> dict[tuple[int, int], list[int]]:
        every = []
        for rank in range(world_size):
            torch.manual_seed(rank)  # the ranks' own generators stand at different places
            random.seed(rank)
            loader = make_loader(
                tensors(30), rank=rank, world_size=world_size, global_batch_size=7, sampler=sampler()
            )
            assert loader.is_training
            every.append(see(loader, epochs=1 if kind == "infinite" else 2, until=8))
        return global_batches(every)

    assert joined(1) == joined(2) == joined(3)
    first = joined(1)
    assert len(first) >= 2


def test_samplers_when_read_leave_the_generators_of_the_loop_alone() -> None:
    loader = make_loader(tensors(30), global_batch_size=7, sampler=Cycling(30))
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    expected = [(torch.rand(()).item(), random.random(), np.random.rand()) for _ in range(3)]
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    drawn = []
    for _ in loader:
        drawn.append((torch.rand(()).item(), random.random(), np.random.rand()))
        if len(drawn) == 3:
            break
    assert drawn == expected


def test_sampler_when_resumed_goes_on_where_it_was() -> None:
    def loader() -> RankLoader:
        return make_loader(tensors(30), global_batch_size=7, sampler=Cycling(30))

    whole = see(loader(), until=6)
    one, two = loader(), loader()
    see(one, until=2)
    two.load_state_dict(one.state_dict())
    assert see(two, until=4) == whole[2:]


def test_batch_sampler_when_divided_keeps_its_batches() -> None:
    batches = [[3, 1, 4], [1, 5], [9, 2, 6, 5, 3]]
    every = []
    for rank in range(2):
        loader = make_loader(tensors(10), rank=rank, world_size=2, batch_sampler=batches)
        assert loader.num_batches == 3
        seen = see(loader)
        assert [each.global_samples for each in seen] == [3, 2, 5]
        every.append(seen)
    assert list(global_batches(every).values()) == batches


def test_positions_when_a_batch_sampler_has_uneven_batches_count_on() -> None:
    loader = make_loader(tensors(10), batch_sampler=[[3, 1, 4], [1, 5], [9]], train=False)
    positions = []
    for _ in loader:
        assert loader.current is not None
        positions += list(loader.current.positions)
    assert positions == list(range(6))


def test_augmentation_when_ranks_and_workers_change_stays_the_same() -> None:
    def values(world_size: int, num_workers: int) -> dict[tuple[int, int], tuple[float, ...]]:
        found = {}
        for rank in range(world_size):
            torch.manual_seed(rank)
            loader = make_loader(
                Numbers(11),
                rank=rank,
                world_size=world_size,
                global_batch_size=4,
                shuffle=True,
                num_workers=num_workers,
            )
            for _ in range(2):
                for data in loader:
                    assert loader.current is not None
                    for row in zip(*(column.tolist() for column in data), strict=True):
                        if loader.current.num_samples:
                            found[loader.state_dict()["epoch"], row[0]] = row[1:]
            loader.close()
        return found

    alone = values(1, 0)
    assert len(alone) == 22 and len({v[0] for v in alone.values()}) == 22
    assert alone == values(3, 0) == values(2, 2)


def test_augmentation_when_resumed_in_an_epoch_needs_no_worker_state() -> None:
    def loader() -> RankLoader:
        return make_loader(Numbers(12), global_batch_size=3, shuffle=True, num_workers=2)

    one, two, three = loader(), loader(), loader()
    whole = [[c.tolist() for c in data] for data in one]
    for _ in zip(range(2), two):  # noqa: B905 - stops after two
        pass
    iterator = iter(three)
    next(iterator), next(iterator)
    state = three.state_dict()
    iterator.close()  # type: ignore[attr-defined]
    two.load_state_dict(state)
    assert [[c.tolist() for c in data] for data in two] == whole[2:]
    for each in (one, two, three):
        each.close()


def test_getitems_when_the_data_set_has_it_reads_a_batch_at_once() -> None:
    calls: list[list[int]] = []

    class Many(Numbers):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            calls.append(indices)
            return [super(Many, self).__getitem__(i) for i in indices]

    loader = make_loader(Many(10), global_batch_size=4, shuffle=True, num_workers=0)
    first = [[c.tolist() for c in data] for data in loader]
    assert [len(c) for c in calls] == [4, 4, 2]
    loader.set_epoch(0)
    assert [[c.tolist() for c in data] for data in loader] == first


class Seldom(Numbers):
    """Draws only for a few of its samples; counts its reads."""

    reads = 0

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        return super().__getitem__(index) if index % 7 == 3 else (index, 0.0, 0.0, 0.0)


def test_augmentation_when_only_some_samples_draw_does_not_depend_on_the_batch_they_are_in() -> None:
    def values(batch: int) -> dict[int, tuple[float, ...]]:
        loader = make_loader(Seldom(40), global_batch_size=batch, train=True, num_workers=0)
        return {row[0]: tuple(row[1:]) for data in loader for row in zip(*map(list, data), strict=True)}

    def plain(found: dict[int, tuple[float, ...]]) -> dict[int, tuple[float, ...]]:
        return {int(i): tuple(map(float, v)) for i, v in found.items()}

    assert plain(values(3)) == plain(values(8)) == plain(values(40))


def test_samples_when_nothing_is_drawn_are_read_once_each() -> None:
    class Quiet(Seldom):
        def __getitem__(self, index: int) -> Any:
            self.reads += 1
            return index

    for data in (Quiet(40), Numbers(40)):
        reads: list[int] = []
        read = type(data).__getitem__
        type(data).__getitem__ = lambda self, i, read=read, reads=reads: (reads.append(i), read(self, i))[1]  # type: ignore[method-assign]
        try:
            list(make_loader(data, global_batch_size=4, shuffle=True, num_workers=0))
        finally:
            type(data).__getitem__ = read  # type: ignore[method-assign]
        assert sorted(reads) == list(range(40))
