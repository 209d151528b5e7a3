"""What do loaders of real ranks agree on, and what do they say when they cannot?"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset, SubsetRandomSampler, TensorDataset, get_worker_info

from allranks.core.errors import RanksDisagree
from allranks.data import make_loader
from support.ranks import run_outcomes, run_ranks

pytestmark = pytest.mark.ranks


class Files(IterableDataset[int]):
    """Each rank (and worker) reads its own files; they are of different lengths."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def __iter__(self) -> Any:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        info = get_worker_info()
        worker, num_workers = (info.id, info.num_workers) if info is not None else (0, 1)
        for file in range(rank, len(self.lengths), world_size):
            first = sum(self.lengths[:file])
            yield from range(first + worker, first + self.lengths[file], num_workers)


def train_on(source: Any, batch: int, **settings: Any) -> list[tuple[int, int, bool, list[int], int]]:
    """Go through a loader with an all-reduce at the end of each window, as a training does: unequal counts would hang."""
    loader = make_loader(
        source, rank=dist.get_rank(), world_size=dist.get_world_size(), global_batch_size=batch, **settings
    )
    seen = []
    for data in loader:
        mark = loader.current
        assert mark is not None
        own = (data if isinstance(data, torch.Tensor) else data[0])[: mark.num_samples].tolist()
        seen.append((mark.batch, mark.micro, mark.is_last, own, mark.global_samples))
        if mark.is_last:
            of_all = torch.tensor(sum(len(s[3]) for s in seen if s[0] == mark.batch))
            dist.all_reduce(of_all)
            assert of_all.item() == mark.global_samples
    loader.close()
    return seen


@pytest.mark.parametrize(("world_size", "num_workers"), [(1, 0), (2, 0), (3, 0), (2, 2)])
def test_uneven_parts_when_trained_on_end_together_and_use_each_sample_once(
    world_size: int, num_workers: int
) -> None:
    lengths = [13, 2, 5]
    every = run_ranks(world_size, _train_files, lengths, 4, num_workers)
    assert len({tuple(s[:3] for s in seen) for seen in every}) == 1
    assert sorted(i for seen in every for s in seen for i in s[3]) == list(range(20))


def _train_files(lengths: list[int], batch: int, num_workers: int) -> Any:
    # These ranks come from a fork server; those of a launcher fork their workers, as here.
    context = "fork" if num_workers else None
    return train_on(
        Files(lengths), batch, num_workers=num_workers, accumulation_steps=2, multiprocessing_context=context
    )


def _train_map(length: int, batch: int) -> Any:
    return train_on(TensorDataset(torch.arange(length)), batch, shuffle=True, micro_batch_size=2)


def test_map_style_when_trained_on_by_ranks_is_one_sequence() -> None:
    one, three = run_ranks(1, _train_map, 29, 7), run_ranks(3, _train_map, 29, 7)
    for batch in range(5):
        of_one = [i for s in one[0] if s[0] == batch for i in s[3]]
        assert of_one == [i for seen in three for s in seen if s[0] == batch for i in s[3]]


def _different(what: str) -> Any:
    rank = dist.get_rank()
    data = TensorDataset(torch.arange(20 + (rank if what == "length" else 0)))
    settings: dict[str, Any] = {"shuffle": True, "seed": rank if what == "seed" else 0}
    if what == "sampler":
        generator = torch.Generator().manual_seed(rank)
        settings = {"sampler": SubsetRandomSampler(range(20), generator=generator)}
    batch = 4 + 4 * (rank if what == "batch" else 0)
    return train_on_quietly(data, batch, **settings)


def train_on_quietly(source: Any, batch: int, **settings: Any) -> int:
    loader = make_loader(
        source, rank=dist.get_rank(), world_size=dist.get_world_size(), global_batch_size=batch, **settings
    )
    return sum(1 for _ in loader)


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("length", "the number of samples is 20 on rank 0 and 21 on rank 1"),
        ("batch", "global_batch_size is 4 on rank 0 and 8 on rank 1"),
        ("seed", "the seed is 0 on rank 0 and 1 on rank 1"),
        ("sampler", "rank 0 and rank 1 see different samples in the same global batch"),
    ],
)
def test_loaders_when_ranks_differ_are_refused_on_every_rank(what: str, text: str) -> None:
    for outcome in run_outcomes(2, _different, what):
        assert isinstance(outcome.error, RanksDisagree) and outcome.error.code == "AR137", outcome.story()
        assert text in str(outcome.error)


class Own(IterableDataset[int]):
    """Made differently on each rank, which its code does not show."""

    def __init__(self, numbers: list[int]) -> None:
        self.numbers = numbers

    def __iter__(self) -> Any:
        return iter(self.numbers)


def _own_parts(sharded: bool | None) -> int:
    first = 10 * dist.get_rank()
    return train_on_quietly(Own(list(range(first, first + 10))), 4, sharded=sharded, num_workers=0)


def test_stream_when_each_rank_has_another_one_must_say_so() -> None:
    for outcome in run_outcomes(2, _own_parts, None):
        assert isinstance(outcome.error, RanksDisagree) and outcome.error.code == "AR137", outcome.story()
        assert "sharded=True" in str(outcome.error)
    assert run_ranks(2, _own_parts, True) == [5, 5]


class Names(Own):
    """Its code mentions a rank, but it does not divide itself."""

    def __iter__(self) -> Any:
        self.rank = 3
        return iter(self.numbers)


def _same_parts(sharded: bool | None) -> int:
    return train_on_quietly(Names(list(range(12))), 4, sharded=sharded, num_workers=0)


def test_stream_when_all_ranks_read_the_same_is_not_taken_for_divided() -> None:
    for outcome in run_outcomes(2, _same_parts, None):
        assert isinstance(outcome.error, RanksDisagree) and outcome.error.code == "AR148", outcome.story()
    assert run_ranks(2, _same_parts, False) == [3, 3]


def _one_empty() -> int:
    numbers = list(range(10)) if dist.get_rank() == 0 else []
    return train_on_quietly(Own(numbers), 4, sharded=True, num_workers=0)


def test_stream_when_a_rank_gets_nothing_names_that_rank() -> None:
    for outcome in run_outcomes(2, _one_empty):
        assert isinstance(outcome.error, RanksDisagree) and outcome.error.code == "AR142", outcome.story()
        assert "no sample for rank 1" in str(outcome.error)


def _evaluate_alone() -> int:
    if dist.get_rank() == 1:
        return 0
    data = TensorDataset(torch.arange(10))
    return train_on_quietly(data, 4) + train_on_quietly(
        Own([1, 2, 3]), 2, train=False, sharded=True, num_workers=0
    )


def test_evaluation_when_only_one_rank_does_it_waits_for_nobody() -> None:
    assert run_ranks(2, _evaluate_alone) == [3 + 3, 0]


def _look_on_rank_0() -> list[list[int]]:
    data = TensorDataset(torch.arange(12))
    loader = make_loader(data, rank=dist.get_rank(), world_size=2, global_batch_size=4, shuffle=True)
    if dist.get_rank() == 0:
        next(iter(loader))
    return [loader.current.indices or [] for _ in loader if loader.current is not None]


def test_a_look_at_the_first_batch_when_on_one_rank_only_keeps_the_ranks_together() -> None:
    first, second = run_ranks(2, _look_on_rank_0)
    assert sorted(i for batch in first + second for i in batch) == list(range(12))
