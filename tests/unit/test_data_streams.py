"""Are iterable data sets divided without a sample lost or doubled, and is their sequence that of one rank?"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from allranks.core.errors import AllranksWarning, UsageError
from allranks.data import RankLoader, make_loader
from allranks.data.division import division_of, fingerprint_of

pytestmark = pytest.mark.filterwarnings("ignore:AR134")


class Plain(IterableDataset[int]):
    """Knows nothing of ranks and workers."""

    def __init__(self, length: int | None) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        number = 0
        while self.length is None or number < self.length:
            yield number
            number += 1


class Noisy(Plain):
    """Draws from three generators while it is read; shuffles by one of them."""

    def __iter__(self) -> Iterator[Any]:
        for number in random.sample(range(self.length or 0), self.length or 0):
            yield number, torch.rand((), dtype=torch.float64).item(), np.random.rand()


class ByWorker(Plain):
    """Divides itself over workers, as torch's documentation shows."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return iter(range(first, self.length or 0, step))


class ByRank(Plain):
    """Divides itself over ranks."""

    def __init__(self, length: int, rank: int, world_size: int) -> None:
        super().__init__(length)
        self.rank, self.world_size = rank, world_size

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank, self.length or 0, self.world_size))


class Stateful(Plain):
    """Says where it stands."""

    opened = 0

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.at = 0

    def __iter__(self) -> Iterator[Any]:
        while self.at < (self.length or 0):
            self.at += 1
            Stateful.opened += 1
            yield self.at - 1, random.random()
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def rows(loader: RankLoader, until: int | None = None) -> list[tuple[int, int, int, list[Any], list[int]]]:
    """(batch, micro, num_micro, own samples, positions) of each micro-batch."""
    found = []
    for data in loader:
        mark = loader.current
        assert mark is not None
        columns = data if isinstance(data, list) else [data]
        samples = list(zip(*(c.tolist() for c in columns), strict=True))[: mark.num_samples]
        if len(columns) == 1:
            samples = [s[0] for s in samples]
        found.append((mark.batch, mark.micro, mark.num_micro, samples, list(mark.positions)))
        if len(found) == until:
            break
    return found


def joined(every: list[list[tuple[int, int, int, list[Any], list[int]]]]) -> dict[int, list[Any]]:
    batches: dict[int, list[Any]] = {}
    for of_rank in every:
        for batch, _, _, samples, _ in of_rank:
            batches.setdefault(batch, []).extend(samples)
    return batches


@settings(deadline=None, max_examples=40)
@given(
    length=st.integers(1, 40),
    batch=st.integers(1, 12),
    world_size=st.integers(1, 4),
    steps=st.integers(1, 3),
    drop_last=st.booleans(),
)
def test_whole_stream_on_any_number_of_ranks_is_the_sequence_of_one(
    length: int, batch: int, world_size: int, steps: int, drop_last: bool
) -> None:
    if drop_last and length < batch:
        return
    every = [
        rows(
            make_loader(
                Plain(length),
                rank=rank,
                world_size=world_size,
                global_batch_size=batch,
                accumulation_steps=steps,
                drop_last=drop_last,
                num_workers=0,
            )
        )
        for rank in range(world_size)
    ]
    expected = {
        g: list(range(g * batch, min(length, (g + 1) * batch)))
        for g in range(length // batch if drop_last else -(-length // batch))
    }
    assert joined(every) == expected
    assert len({tuple((b, m, n) for b, m, n, _, _ in of_rank) for of_rank in every}) == 1
    positions = sorted(p for of_rank in every for *_, place in of_rank for p in place)
    assert positions == list(range(len(positions)))


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 4))
def test_whole_stream_in_evaluation_gives_each_sample_once(length: int, batch: int, world_size: int) -> None:
    samples = []
    for rank in range(world_size):
        loader = make_loader(
            Plain(length),
            rank=rank,
            world_size=world_size,
            global_batch_size=batch,
            train=False,
            num_workers=0,
        )
        samples += [s for row in rows(loader) for s in row[3]]
    assert sorted(samples) == list(range(length))


def noisy(world_size: int, num_workers: int, **more: Any) -> dict[int, list[Any]]:
    every = []
    for rank in range(world_size):
        torch.manual_seed(rank)
        loader = make_loader(
            Noisy(23),
            rank=rank,
            world_size=world_size,
            global_batch_size=6,
            accumulation_steps=2,
            num_workers=num_workers,
            seed=4,
            **more,
        )
        every.append(rows(loader) + [(b + 100, m, n, s, p) for b, m, n, s, p in rows(loader)])
        loader.close()
    return joined(every)


def test_whole_stream_when_it_draws_random_numbers_is_the_same_on_ranks_and_workers() -> None:
    alone = noisy(1, 0)
    assert sorted(s[0] for b, samples in alone.items() if b < 100 for s in samples) == list(range(23))
    assert alone[0] != alone[100]  # another epoch, another order
    assert alone == noisy(3, 0) == noisy(2, 2)


def test_whole_stream_when_workers_stay_for_several_epochs_is_the_same() -> None:
    assert noisy(1, 2, persistent_workers=True) == noisy(1, 0)


def test_whole_stream_when_infinite_gives_batches() -> None:
    loader = make_loader(Plain(None), global_batch_size=4, num_workers=0)
    assert [r[3] for r in rows(loader, until=3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    with pytest.raises(TypeError, match="not known before its end"):
        len(loader)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("stop", [0, 1, 3, 7, 8])
def test_whole_stream_when_resumed_anywhere_goes_on_as_if_never_stopped(num_workers: int, stop: int) -> None:
    def loader() -> RankLoader:
        return make_loader(
            Noisy(23),
            global_batch_size=6,
            accumulation_steps=2,
            num_workers=num_workers,
            rank=1,
            world_size=2,
        )

    whole = rows(loader())
    assert len(whole) == 8
    one, two = loader(), loader()
    before = rows(one, until=stop) if stop else []
    two.load_state_dict(one.state_dict())
    after = rows(two) if stop < 8 else []
    assert before + after == whole


def test_whole_stream_when_resumed_on_other_ranks_continues_the_sequence() -> None:
    alone = noisy(1, 0)
    one = make_loader(Noisy(23), global_batch_size=6, num_workers=0, seed=4)
    rows(one, until=2)
    every = []
    for rank in range(3):
        other = make_loader(Noisy(23), rank=rank, world_size=3, global_batch_size=6, num_workers=0, seed=4)
        other.load_state_dict(one.state_dict())
        every.append(rows(other))
    assert joined(every) == {g: alone[g] for g in (2, 3)}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_stateful_stream_when_resumed_is_not_read_from_the_start(num_workers: int) -> None:
    def loader() -> RankLoader:
        return make_loader(
            Stateful(30),
            global_batch_size=6,
            accumulation_steps=2,
            num_workers=num_workers,
            rank=0,
            world_size=2,
        )

    whole = rows(loader())
    for stop in (1, 4, 5):
        one, two = loader(), loader()
        rows(one, until=stop)
        state = one.state_dict()
        assert state["data_set"]["data_set"] == {"at": 6 * (stop // 2)}
        two.load_state_dict(state)
        assert two.state_dict() == {**state, "rank": 0}
        Stateful.opened = 0
        assert rows(two) == whole[stop:]
        if num_workers == 0:
            assert Stateful.opened == 30 - 6 * (stop // 2)


def test_data_set_when_its_code_looks_at_rank_or_worker_is_found_to_divide_itself() -> None:
    assert division_of(Plain(3), None) == "whole"
    assert division_of(ByWorker(3), None) == "as workers"
    assert division_of(ByRank(3, 0, 1), None) == "rank"
    assert division_of(ByRank(3, 0, 1), False) == "whole"
    assert division_of(Plain(3), True) == "own"


@pytest.mark.parametrize("num_workers", [0, 1, 2])
@pytest.mark.parametrize("kind", ["worker", "rank"])
def test_data_set_when_it_divides_itself_is_read_once_over_ranks_and_workers(
    kind: str, num_workers: int
) -> None:
    samples = []
    for rank in range(2):
        data = ByWorker(21) if kind == "worker" else ByRank(21, rank, 2)
        loader = make_loader(
            data, rank=rank, world_size=2, global_batch_size=4, train=False, num_workers=num_workers
        )
        samples += [s for row in rows(loader) for s in row[3]]
    assert sorted(samples) == list(range(21))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_data_set_when_it_divides_itself_and_is_resumed_goes_on(num_workers: int) -> None:
    def loader() -> RankLoader:
        return make_loader(
            ByWorker(25), global_batch_size=4, accumulation_steps=2, num_workers=num_workers, sharded=True
        )

    whole = rows(loader())
    assert sorted(s for row in whole for s in row[3]) == list(range(25))
    for stop in (1, 2, 6, len(whole)):
        one, two = loader(), loader()
        rows(one, until=stop)
        two.load_state_dict(one.state_dict())
        assert rows(two) == whole[stop:]


def test_data_set_when_it_divides_itself_and_ranks_change_says_so() -> None:
    one = make_loader(ByRank(20, 0, 1), global_batch_size=4, num_workers=0)
    rows(one, until=2)
    two = make_loader(ByRank(20, 0, 2), rank=0, world_size=2, global_batch_size=4, num_workers=0)
    with pytest.warns(AllranksWarning, match="AR149 the data set ByRank divides itself"):
        two.load_state_dict(one.state_dict())


def test_data_set_when_it_divides_itself_needs_a_process_group_for_training() -> None:
    loader = make_loader(ByRank(20, 0, 2), rank=0, world_size=2, global_batch_size=4, num_workers=0)
    with pytest.raises(UsageError, match="AR146"):
        next(iter(loader))


def test_stream_when_empty_or_given_an_order_is_refused() -> None:
    with pytest.raises(UsageError, match="AR133 the iterable data set Plain gave no sample"):
        list(make_loader(Plain(0), global_batch_size=2, num_workers=0))
    assert list(make_loader(Plain(0), global_batch_size=2, num_workers=0, train=False)) == []
    with pytest.raises(UsageError, match="AR140 shuffle was given for the iterable data set Plain"):
        make_loader(Plain(4), global_batch_size=2, shuffle=True)
    with pytest.raises(UsageError, match="AR130"):
        make_loader(DataLoader(Plain(4), batch_size=None))


def test_stream_when_in_a_dataloader_keeps_its_settings() -> None:
    theirs = DataLoader(Plain(10), batch_size=4, drop_last=True, collate_fn=lambda b: torch.tensor(b) * 10)
    ours = make_loader(theirs)
    assert [x.tolist() for x in ours] == [[0, 10, 20, 30], [40, 50, 60, 70]]


def test_fingerprints_when_samples_differ_differ() -> None:
    def sample() -> Any:
        return [{"x": torch.arange(3), "y": np.ones(2), "z": ("a", 1.5, None, b"b", object())}]

    assert fingerprint_of(sample()) == fingerprint_of(sample())
    others = [sample() for _ in range(5)]
    others[0][0]["x"] = torch.arange(3).float()
    others[1][0]["y"] = np.zeros(2)
    others[2][0]["z"] = ("a", 1.5, None, b"c", object())
    others[3].append(1)
    others[4][0]["x"] = torch.arange(3).reshape(3, 1)
    prints = {fingerprint_of(o) for o in others} | {fingerprint_of(sample())}
    assert len(prints) == 6
