"""Is the data set a set of tensors in memory? Then a whole batch is indexed at once, with no Python per sample.

    TensorDataset, Subset of one, Subset of a Subset ...

Also says of which data sets it is known that reading them draws no random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset, default_collate

from allranks.data.batch import MicroBatch


def is_tensors(dataset: Any, collate_fn: Callable[..., Any] | None) -> bool:
    """Whether batches can be cut out of tensors: the exact classes of torch, and torch's own collate function."""
    if collate_fn is not None and collate_fn is not default_collate:
        return False
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return type(dataset) is TensorDataset and all(t.layout is torch.strided for t in dataset.tensors)


def is_free_of_randomness(dataset: Any) -> bool:
    """Whether reading a sample surely draws no random number: TensorDataset and torch's compositions of it."""
    if type(dataset) is TensorDataset:
        return True
    if type(dataset) is Subset:
        return is_free_of_randomness(dataset.dataset)
    if type(dataset) is ConcatDataset:
        return all(is_free_of_randomness(each) for each in dataset.datasets)
    if type(dataset) is StackDataset:
        parts = dataset.datasets
        return all(is_free_of_randomness(e) for e in (parts.values() if isinstance(parts, dict) else parts))
    return False


class TensorEngine:
    """Gives the batches that DataLoader with default_collate would give: a list with one tensor per tensor."""

    def __init__(self, dataset: Any, *, pin_memory: bool = False) -> None:
        chosen: torch.Tensor | None = None
        while type(dataset) is Subset:
            picked = torch.as_tensor(list(dataset.indices), dtype=torch.int64)
            chosen = picked if chosen is None else picked[chosen]
            dataset = dataset.dataset
        self.tensors: tuple[torch.Tensor, ...] = dataset.tensors
        self.chosen, self.pin_memory = chosen, pin_memory
        self._is_plain = (
            chosen is None and not pin_memory and all(t.device.type == "cpu" for t in self.tensors)
        )

    def batches(self, plan: Iterable[MicroBatch], seed: int) -> Iterator[tuple[MicroBatch, Any]]:
        """The micro-batches of a plan with their data, in order."""
        for each in plan:
            picked = each.slice_to_load()
            if self._is_plain and isinstance(picked, torch.Tensor):  # most loops: in one line
                yield each, [t.index_select(0, picked) for t in self.tensors]
                continue
            data = self._cut(picked)
            if self.pin_memory:
                data = [t.pin_memory() if t.device.type == "cpu" else t for t in data]
            yield each, data

    def _cut(self, picked: Any) -> list[torch.Tensor]:
        chosen = self.chosen
        if isinstance(picked, range) and chosen is None:
            # A copy, as default_collate makes one: the loop may change its batch in place.
            return [t[picked.start : picked.stop].clone() for t in self.tensors]
        index = picked if isinstance(picked, torch.Tensor) else torch.as_tensor(list(picked))
        if chosen is not None:
            index = chosen[index]
        return [
            t.index_select(0, index if t.device.type == "cpu" else index.to(t.device)) for t in self.tensors
        ]

    def close(self) -> None:
        """Nothing to end."""
