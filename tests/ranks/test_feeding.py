"""Which batch size does run.loader take: the run's, the loader's own, or does it ask?"""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, SequentialSampler

import allranks
from allranks.core.errors import UsageError
from ranks.reference import points
from support.ranks import run_ranks

pytestmark = pytest.mark.ranks


def sizes(folder: str) -> list[Any]:
    data = points(48)
    with allranks.start(folder, global_batch_size=16, micro_batch_size=4) as run:
        found: list[Any] = []
        found.append(run.loader(data, shuffle=True).num_batches)
        found.append(run.loader(data, shuffle=True, global_batch_size=24).num_batches)
        found.append(run.loader(DataLoader(data, batch_size=16, shuffle=True)).num_batches)
        found.append(
            run.loader(DataLoader(data, batch_size=48)).num_batches
        )  # for evaluation any size will do
        per_rank = DistributedSampler(data, num_replicas=run.world_size, rank=run.rank)
        found.append(
            run.loader(DataLoader(data, batch_size=16 // run.world_size, sampler=per_rank)).num_batches
        )
        batches = BatchSampler(SequentialSampler(data), 12, False)
        found.append(run.loader(data, batch_sampler=batches).num_batches)
        found.append(len(run.loader(data, shuffle=True, accumulation_steps=2)))
        with pytest.raises(
            UsageError, match=r"AR130 allranks.start says global_batch_size=16, what loader8 .* gives 8 "
        ):
            run.loader(DataLoader(data, batch_size=8, shuffle=True))
        found.append(
            run.loader(DataLoader(data, batch_size=8, shuffle=True), global_batch_size=8).num_batches
        )
        return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_loader_then_batch_size_is_the_runs_or_said(tmp_path: Any, world_size: int) -> None:
    expected = [3, 2, 3, 1, 3, 4, 6, 6]
    assert run_ranks(world_size, sizes, str(tmp_path), init=False) == [expected] * world_size
