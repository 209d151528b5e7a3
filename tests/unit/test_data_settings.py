"""Is an existing DataLoader kept, and what cannot be done refused?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
)

from allranks.core.errors import AllranksWarning, UsageError
from allranks.data import make_loader
from support.sequences import Numbers, global_batches, see, tensors

pytestmark = pytest.mark.filterwarnings("ignore:AR134")


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


def test_fewer_samples_than_ranks_when_training_is_said() -> None:
    with pytest.warns(
        AllranksWarning, match="AR134 global_batch_size=2 is less than the 97 ranks: 95 of them"
    ):
        make_loader(tensors(10), rank=0, world_size=97, global_batch_size=2, shuffle=True)


def test_accumulation_steps_when_they_cannot_be_filled_are_said(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    loader = make_loader(tensors(18), global_batch_size=9, accumulation_steps=4, shuffle=True)
    assert len(loader) == 6
    assert (
        "accumulation_steps=4: a global batch of 9 on 1 ranks makes 3 micro-batches of at most 3"
        in caplog.text
    )
    caplog.clear()
    make_loader(tensors(18), global_batch_size=8, accumulation_steps=4, shuffle=True)
    assert "accumulation_steps" not in caplog.text


def test_a_plain_list_when_given_is_a_data_set() -> None:
    assert [x.tolist() for x in make_loader([5, 6, 7], global_batch_size=2, num_workers=0)] == [[5, 6], [7]]
