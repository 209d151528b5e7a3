"""What did a loader give? The micro-batches of a rank, and the global batches of all ranks, as plain values."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st
from torch.utils.data import Dataset, TensorDataset

from allranks.data import RankLoader, make_loader


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
