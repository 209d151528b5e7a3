"""What is known of one loader before it is made: the user's wish, and what torch's DataLoader is told for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.utils.data import IterableDataset, default_collate


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderSettings:
    """How samples are fetched: what torch's DataLoader is told.

    Attributes:
        num_workers: Loader workers of this rank.
        collate_fn: Makes a batch of a list of samples.
        worker_init_fn: The user's own, called in each worker after ours.
        pin_memory: Whether batches are put into pinned memory, for the copy to the accelerator.
    """

    num_workers: int
    collate_fn: Callable[[list[Any]], Any] = default_collate
    worker_init_fn: Callable[[int], Any] | None = None
    pin_memory: bool = False
    persistent_workers: bool = False
    prefetch_factor: int | None = None
    timeout_s: float = 0
    multiprocessing_context: Any = None

    def torch_arguments(self) -> dict[str, Any]:
        """The arguments of a DataLoader; those for workers only where there are workers, as torch insists."""
        arguments: dict[str, Any] = {"num_workers": self.num_workers, "pin_memory": self.pin_memory}
        if self.num_workers:
            arguments |= {
                "persistent_workers": self.persistent_workers,
                "prefetch_factor": self.prefetch_factor,
                "timeout": self.timeout_s,
                "multiprocessing_context": self.multiprocessing_context,
            }
        return arguments


@dataclass(kw_only=True, slots=True)
class Wanted:
    """Everything about one loader, from the arguments and an existing DataLoader together; None where nobody said."""

    dataset: Any
    global_batch_size: int | None = None
    shuffle: bool | None = None
    drop_last: bool = False
    sampler: Iterable[Any] | None = None
    batch_sampler: Iterable[Any] | None = None
    seed: int = 0
    train: bool | None = None
    num_workers: int | Literal["auto"] | None = None
    collate_fn: Callable[..., Any] | None = None
    worker_init_fn: Callable[[int], Any] | None = None
    pin_memory: bool | None = None
    persistent_workers: bool | None = None
    prefetch_factor: int | None = None
    timeout_s: float = 0
    multiprocessing_context: Any = None

    @property
    def is_iterable(self) -> bool:
        return isinstance(self.dataset, IterableDataset) or not hasattr(self.dataset, "__getitem__")

    def is_training(self) -> bool:
        """As told; otherwise whatever does not simply go through the data set once in order is for training."""
        if self.train is not None:
            return self.train
        return (
            bool(self.shuffle)
            or self.sampler is not None
            or self.batch_sampler is not None
            or self.is_iterable
        )

    def settings(self, num_workers: int, device: torch.device) -> LoaderSettings:
        """What torch's DataLoader is told for this rank."""
        pinned = device.type == "cuda" and self.pin_memory is not False
        persistent = num_workers > 0 and (
            not self.is_iterable if self.persistent_workers is None else self.persistent_workers
        )
        return LoaderSettings(
            num_workers=num_workers,
            collate_fn=self.collate_fn or default_collate,
            worker_init_fn=self.worker_init_fn,
            pin_memory=pinned,
            persistent_workers=persistent,
            prefetch_factor=self.prefetch_factor if num_workers else None,
            timeout_s=self.timeout_s,
            multiprocessing_context=self.multiprocessing_context,
        )
