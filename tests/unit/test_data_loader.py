"""Is the sequence of global batches that of one device, on any number of ranks, from any point on?"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

from allranks.core.errors import AllranksWarning, CheckpointError, UsageError
from allranks.data import MicroBatch, RankLoader, make_loader

pytestmark = pytest.mark.filterwarnings("ignore:AR134")


class Seen(NamedTuple):
    """What one micro-batch of a rank was."""

    epoch: int
    batch: int
    micro: int
    indices: list[int]
    loaded: list[int]
    is_last: bool
    global_samples: int


class Numbers(Dataset[Any]):
    """Index i gives i and three random numbers, one of each generator."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return index, torch.rand((), dtype=torch.float64).item(), random.random(), np.random.rand()


def tensors(length: int) -> TensorDataset:
    return TensorDataset(torch.arange(length))


def see(loader: RankLoader, epochs: int = 1, until: int | None = None) -> list[Seen]:
    """Go through a loader; at most `until` micro-batches."""
    seen: list[Seen] = []
    for _ in range(epochs):
        for data in loader:
            mark = loader.current
            assert mark is not None
            loaded = data[0].tolist()
            indices = mark.indices
            assert indices == (loaded if mark.num_samples else [])
            assert len(mark.positions) == mark.num_samples == len(indices)
            seen.append(
                Seen(
                    loader.state_dict()["epoch"],
                    mark.batch,
                    mark.micro,
                    indices,
                    loaded,
                    mark.is_last,
                    mark.global_samples,
                )
            )
            if len(seen) == until:
                return seen
    return seen


def global_batches(every: list[list[Seen]]) -> dict[tuple[int, int], list[int]]:
    """The samples of each global batch: the ranks' shares in the order of ranks."""
    joined: dict[tuple[int, int], list[int]] = {}
    for seen in every:
        for each in seen:
            joined.setdefault((each.epoch, each.batch), []).extend(each.indices)
    return joined


jobs = st.fixed_dictionaries(
    {
        "length": st.integers(1, 60),
        "batch": st.integers(1, 20),
        "world_size": st.integers(1, 4),
        "division": st.one_of(
            st.fixed_dictionaries({"accumulation_steps": st.integers(1, 4)}),
            st.fixed_dictionaries({"micro_batch_size": st.integers(1, 6)}),
        ),
    }
)


def ranks_of(job: dict[str, Any], world_size: int | None = None, **more: Any) -> list[RankLoader]:
    size = world_size or job["world_size"]
    return [
        make_loader(
            tensors(job["length"]),
            rank=rank,
            world_size=size,
            global_batch_size=job["batch"],
            **job["division"],
            **more,
        )
        for rank in range(size)
    ]


@settings(deadline=None)
@given(jobs, st.booleans())
def test_training_on_any_number_of_ranks_when_joined_is_the_sequence_of_one_rank(
    job: dict[str, Any], shuffle: bool
) -> None:
    every = [see(each, epochs=2) for each in ranks_of(job, shuffle=shuffle, train=True)]
    alone = [see(each, epochs=2) for each in ranks_of(job, 1, shuffle=shuffle, train=True)]
    assert global_batches(every) == global_batches(alone)
    for epoch in (0, 1):
        of_epoch = [i for (e, _), indices in global_batches(every).items() if e == epoch for i in indices]
        assert sorted(of_epoch) == list(range(job["length"]))


@settings(deadline=None)
@given(jobs)
def test_training_when_ranks_are_compared_has_equal_counts_and_fair_shares(job: dict[str, Any]) -> None:
    loaders = ranks_of(job, shuffle=True)
    every = [see(each) for each in loaders]
    assert {len(seen) for seen in every} == {len(each) for each in loaders}
    for marks in zip(*every, strict=True):
        assert len({(m.batch, m.micro, m.is_last, m.global_samples) for m in marks}) == 1
        assert all(m.loaded for m in marks)
    shares: dict[int, list[int]] = {}
    for rank, seen in enumerate(every):
        for each in seen:
            shares.setdefault(each.batch, [0] * len(every))[rank] += len(each.indices)
    for of_ranks in shares.values():
        assert max(of_ranks) - min(of_ranks) <= 1


@settings(deadline=None)
@given(jobs)
def test_training_when_drop_last_leaves_out_only_the_last_partial_batch(job: dict[str, Any]) -> None:
    if job["length"] < job["batch"]:
        return
    every = global_batches([see(each) for each in ranks_of(job, shuffle=True, drop_last=True)])
    whole = global_batches([see(each) for each in ranks_of(job, shuffle=True)])
    assert every == {key: value for key, value in whole.items() if len(value) == job["batch"]}


@settings(deadline=None)
@given(jobs)
def test_evaluation_on_any_number_of_ranks_gives_each_sample_once(job: dict[str, Any]) -> None:
    loaders = ranks_of(job)
    every = [see(each) for each in loaders]
    assert [len(seen) for seen in every] == [len(each) for each in loaders]
    assert not any(each.is_training for each in loaders)
    loaded = sorted(i for seen in every for each in seen for i in each.loaded)
    assert loaded == list(range(job["length"]))


@settings(deadline=None)
@given(jobs, st.data())
def test_resume_when_at_any_point_goes_on_as_if_never_stopped(
    job: dict[str, Any], data: st.DataObject
) -> None:
    whole = see(ranks_of(job, shuffle=True)[-1], epochs=2)
    stop = data.draw(st.integers(0, len(whole)))
    first, second = ranks_of(job, shuffle=True)[-1], ranks_of(job, shuffle=True)[-1]
    before = see(first, epochs=2, until=stop) if stop else []
    assert before == whole[:stop]
    second.load_state_dict(first.state_dict())
    after: list[Seen] = []
    while len(after) < len(whole) - stop:
        after += see(second, until=len(whole) - stop - len(after))
    assert after == whole[stop:]


@settings(deadline=None)
@given(jobs, st.integers(1, 4), st.data())
def test_resume_when_on_another_number_of_ranks_continues_the_global_sequence(
    job: dict[str, Any], other: int, data: st.DataObject
) -> None:
    alone = global_batches([see(each) for each in ranks_of(job, 1, shuffle=True)])
    stop = data.draw(st.integers(0, len(alone)))
    states, before = [], []
    for each in ranks_of(job, shuffle=True):
        seen: list[Seen] = []
        for _ in each:
            mark = each.current
            assert mark is not None
            if mark.batch < stop:
                seen.append(Seen(0, mark.batch, mark.micro, mark.indices or [], [], False, 0))
            if mark.batch == stop - 1 and mark.is_last:
                states.append(each.state_dict())
                break
        before.append(seen)
    after = []
    for each in ranks_of(job, other, shuffle=True):
        if stop:
            each.load_state_dict(states[0])
        after.append(see(each))
    assert global_batches(before) | global_batches(after) == alone


def test_resume_when_inside_a_window_on_other_ranks_begins_the_window_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    job = {"length": 16, "batch": 8, "world_size": 2, "division": {"micro_batch_size": 2}}
    one = ranks_of(job, shuffle=True)[0]
    see(one, until=3)
    assert one.state_dict()["batch"] == 1 and one.state_dict()["micro"] == 1
    every = ranks_of(job, 1, shuffle=True)
    every[0].load_state_dict(one.state_dict())
    assert [each.batch for each in see(every[0])] == [1, 1, 1, 1]
    assert "start of global batch 1" in caplog.text


def test_state_when_of_another_data_set_is_refused() -> None:
    one = make_loader(tensors(20), global_batch_size=4, shuffle=True)
    other = make_loader(tensors(21), global_batch_size=4, shuffle=True)
    with pytest.raises(CheckpointError, match=r"AR141 .* 20 samples, the data set has 21"):
        other.load_state_dict(one.state_dict())


def test_state_when_of_another_batch_size_goes_on_at_the_same_sample_or_is_refused() -> None:
    one = make_loader(tensors(24), global_batch_size=4, shuffle=True)
    seen = see(one, until=3)
    fitting = make_loader(tensors(24), global_batch_size=6, shuffle=True)
    fitting.load_state_dict(one.state_dict())
    rest = [i for each in see(fitting) for i in each.indices]
    assert sorted(rest + [i for each in seen for i in each.indices]) == list(range(24))
    unfit = make_loader(tensors(24), global_batch_size=5, shuffle=True)
    with pytest.raises(CheckpointError, match="global_batch_size=4 after 3 batches, now it is 5"):
        unfit.load_state_dict(one.state_dict())


def test_state_when_of_another_seed_goes_on_with_the_saved_seed() -> None:
    one = make_loader(tensors(24), global_batch_size=4, shuffle=True, seed=1)
    whole = see(make_loader(tensors(24), global_batch_size=4, shuffle=True, seed=1))
    see(one, until=2)
    other = make_loader(tensors(24), global_batch_size=4, shuffle=True, seed=2)
    other.load_state_dict(one.state_dict())
    assert see(other) == whole[2:]


def test_state_when_at_the_end_of_an_epoch_gives_no_more_batches_of_it() -> None:
    one = make_loader(tensors(8), global_batch_size=4, shuffle=True, epoch_of=lambda: 5)
    see(one)
    again = make_loader(tensors(8), global_batch_size=4, shuffle=True, epoch_of=lambda: 5)
    again.load_state_dict(one.state_dict())
    assert see(again) == []


def test_state_when_the_run_is_in_another_epoch_begins_at_its_start() -> None:
    one = make_loader(tensors(8), global_batch_size=2, shuffle=True, epoch_of=lambda: 5)
    see(one, until=2)
    again = make_loader(tensors(8), global_batch_size=2, shuffle=True, epoch_of=lambda: 6)
    again.load_state_dict(one.state_dict())
    assert [each.batch for each in see(again)] == [0, 1, 2, 3]


def test_epoch_when_nobody_sets_it_goes_up_by_itself() -> None:
    loader = make_loader(tensors(50), global_batch_size=50, shuffle=True)
    first, second = see(loader), see(loader)
    assert (first[0].epoch, second[0].epoch) == (0, 1)
    assert first[0].indices != second[0].indices
    loader.set_epoch(0)
    assert see(loader) == first


def test_epoch_when_the_run_has_one_gives_a_new_order_to_a_second_pass() -> None:
    epoch = 3
    loader = make_loader(tensors(50), global_batch_size=50, shuffle=True, epoch_of=lambda: epoch)
    first, second = see(loader), see(loader)
    assert first[0].indices != second[0].indices
    epoch = 4
    third = see(loader)
    assert third[0].indices not in (first[0].indices, second[0].indices)
    with pytest.raises(UsageError, match=r"AR147 set_epoch\(1\)"):
        loader.set_epoch(1)


def test_callbacks_when_the_loop_breaks_are_told_of_batches_and_the_end() -> None:
    told: list[Any] = []

    def on_batch(mark: MicroBatch) -> None:
        told.append(mark.batch)

    loader = make_loader(
        tensors(8), global_batch_size=2, on_batch=on_batch, on_end=lambda: told.append("end")
    )
    for _ in loader:
        assert loader.current is not None
        if loader.current.batch == 1:
            break
    assert told == [0, 1, "end"]
    assert loader.current is None
    told.clear()
    assert len(see(loader)) == 4
    assert told == [0, 1, 2, 3, "end"]


def test_an_older_iteration_when_a_newer_one_began_is_refused() -> None:
    loader = make_loader(tensors(8), global_batch_size=2)
    older, newer = iter(loader), iter(loader)
    next(older)
    next(newer)
    with pytest.raises(UsageError, match="AR143"):
        next(older)
    next(newer)


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


def test_dataloader_when_wrapped_keeps_its_settings() -> None:
    def collate(rows: list[Any]) -> Any:
        return torch.tensor([r[0] for r in rows]) * 10

    theirs = DataLoader(tensors(10), batch_size=4, shuffle=True, collate_fn=collate, drop_last=True)
    ours = make_loader(theirs, rank=0, world_size=2)
    assert ours.is_training and ours.global_batch_size == 4 and ours.num_batches == 2
    for data in ours:
        assert ours.current is not None
        assert data.tolist() == [10 * i for i in ours.current.indices or []]
    evaluation = make_loader(DataLoader(tensors(10), batch_size=4), rank=1, world_size=2)
    assert not evaluation.is_training and len(evaluation) == 3
    assert make_loader(theirs, global_batch_size=8).global_batch_size == 8


def test_dataloader_when_its_generator_has_a_seed_is_shuffled_by_it() -> None:
    def order(seed: int) -> list[int]:
        theirs = DataLoader(
            tensors(40), batch_size=40, shuffle=True, generator=torch.Generator().manual_seed(seed)
        )
        return see(make_loader(theirs))[0].indices

    assert order(1) == order(1) != order(2)


def test_distributed_sampler_when_it_fits_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    data = tensors(10)
    every = []
    for rank in range(2):
        sampler = DistributedSampler(data, num_replicas=2, rank=rank, shuffle=True, seed=3)
        loader = make_loader(DataLoader(data, batch_size=2, sampler=sampler), rank=rank, world_size=2)
        assert loader.global_batch_size == 4  # batch_size was one rank's
        every.append(see(loader))
    assert sorted(i for b in global_batches(every).values() for i in b) == list(range(10))
    assert "DistributedSampler" in caplog.text
    alone = make_loader(data, global_batch_size=4, shuffle=True, seed=3)
    assert global_batches(every) == global_batches([see(alone)])


def test_distributed_sampler_when_for_other_ranks_is_refused() -> None:
    data = tensors(10)
    sampler = DistributedSampler(data, num_replicas=3, rank=0)
    with pytest.raises(UsageError, match=r"AR135 .*num_replicas=3, the job has 2 ranks"):
        make_loader(DataLoader(data, batch_size=2, sampler=sampler), rank=0, world_size=2)

    class Own(DistributedSampler[Any]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(self.rank, 10, self.num_replicas))

    with pytest.raises(UsageError, match="AR136 the sampler Own"):
        make_loader(
            DataLoader(data, batch_size=2, sampler=Own(data, num_replicas=2, rank=0)), rank=0, world_size=2
        )


def test_torchs_batch_sampler_when_explicit_is_taken_apart() -> None:
    data = tensors(10)
    theirs = DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), 4, drop_last=True))
    ours = make_loader(theirs)
    assert (ours.global_batch_size, ours.num_batches, ours.is_training) == (4, 2, True)
    plain = make_loader(DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), 4, False)))
    assert not plain.is_training


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({}, "AR130 the loader has no batch size"),
        ({"global_batch_size": 0}, "AR131 global_batch_size=0"),
        ({"global_batch_size": -4}, "AR131 global_batch_size=-4"),
        ({"global_batch_size": 2.5}, r"AR131 global_batch_size=2\.5"),
        ({"global_batch_size": 4, "micro_batch_size": 0}, "AR131 micro_batch_size=0"),
        ({"global_batch_size": 4, "accumulation_steps": True}, "AR131 accumulation_steps=True"),
        ({"global_batch_size": 4, "num_workers": -1}, "AR131 num_workers=-1"),
        ({"global_batch_size": 4, "num_workers": "many"}, "AR131 num_workers='many'"),
        (
            {"global_batch_size": 4, "micro_batch_size": 2, "accumulation_steps": 2},
            "AR132 micro_batch_size=2",
        ),
        (
            {"global_batch_size": 4, "shuffle": True, "sampler": [1, 2]},
            "AR132 shuffle=True and a sampler were both",
        ),
        ({"batch_sampler": [[1]], "sampler": [1]}, "AR132 batch_sampler and sampler"),
        ({"batch_sampler": [[1]], "drop_last": True}, "AR132 batch_sampler and drop_last"),
        ({"batch_sampler": [[1]], "global_batch_size": 4}, "AR132 global_batch_size=4 and a batch_sampler"),
        (
            {"global_batch_size": 40, "drop_last": True, "shuffle": True},
            "AR133 the loader has no batch: 10 samples",
        ),
        ({"global_batch_size": 4, "sharded": True}, "AR140 sharded=True was given for TensorDataset"),
    ],
)
def test_arguments_when_they_cannot_be_are_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        make_loader(tensors(10), **arguments)


def test_sources_when_they_cannot_be_divided_are_refused() -> None:
    with pytest.raises(UsageError, match="AR139 a int is no data set"):
        make_loader(5, global_batch_size=2)
    with pytest.raises(UsageError, match="AR133 the loader has no batch: 0 samples"):
        make_loader(tensors(0), global_batch_size=2, shuffle=True)
    with pytest.raises(UsageError, match="AR130 the DataLoader has batch_size=None"):
        make_loader(DataLoader(tensors(10), batch_size=None))
    with pytest.raises(UsageError, match="AR144 the DataLoader has in_order=False"):
        make_loader(DataLoader(tensors(10), batch_size=2, in_order=False))
    with pytest.raises(UsageError, match=r"AR138 collate_fn=.*lambda"):
        make_loader(
            Numbers(10),
            global_batch_size=2,
            collate_fn=lambda rows: rows,
            num_workers=1,
            multiprocessing_context="spawn",
        )


def test_an_empty_data_set_when_for_evaluation_has_no_batch() -> None:
    assert list(make_loader(tensors(0), global_batch_size=2)) == []


def test_warnings_when_something_may_surprise_say_what() -> None:
    with pytest.warns(AllranksWarning, match="AR145 drop_last=True leaves 2 of 10 samples"):
        make_loader(tensors(10), global_batch_size=4, drop_last=True)
