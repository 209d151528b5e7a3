"""What does the user want of the loader: what he passed, and what his own DataLoader already says?"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from allranks.core.errors import UsageError
from allranks.data.checks import check_dataset, check_global_batch_size, check_picklable

logger = logging.getLogger(__name__)


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
        check_picklable(self, num_workers)
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


def understand(source: Any, world_size: int, given: Wanted) -> Wanted:
    """The user's wish: `given` holds the arguments (its dataset is not used), `source` a data set or a DataLoader.

    Raises:
        UsageError: AR130 no batch size, AR131 a batch size that cannot be, AR132 arguments that exclude each other,
            AR135 and AR136 samplers that cannot be divided, AR139 no data set, AR144 a setting that cannot be kept.
    """
    wanted = _adopt(source, world_size, given) if isinstance(source, DataLoader) else given
    if not isinstance(source, DataLoader):
        wanted.dataset = source
    check_dataset(wanted)
    _unwrap_samplers(wanted, world_size)
    check_global_batch_size(wanted)
    return wanted


def _adopt(loader: DataLoader[Any], world_size: int, given: Wanted) -> Wanted:
    """The settings of an existing DataLoader, except where an argument says otherwise."""
    if not getattr(loader, "in_order", True):
        raise UsageError(
            "AR144",
            "the DataLoader has in_order=False",
            why="which batch comes next would depend on the workers' speed, and differ between ranks and runs",
            fix="leave in_order at True",
        )
    given.dataset = loader.dataset
    given.collate_fn = given.collate_fn or _own_collate(loader)
    given.worker_init_fn = given.worker_init_fn or loader.worker_init_fn
    if given.num_workers is None:
        given.num_workers = loader.num_workers
    if given.pin_memory is None and loader.pin_memory:
        given.pin_memory = True
    if given.persistent_workers is None and given.num_workers:
        given.persistent_workers = loader.persistent_workers or None
    if given.prefetch_factor is None and given.num_workers:
        given.prefetch_factor = loader.prefetch_factor
    given.timeout_s = given.timeout_s or loader.timeout
    if given.num_workers and given.multiprocessing_context is None:
        given.multiprocessing_context = loader.multiprocessing_context
    if isinstance(loader.generator, torch.Generator):
        given.seed = loader.generator.initial_seed()
    if given.sampler is None and given.batch_sampler is None:
        _adopt_order(loader, given)
    return given


def _own_collate(loader: DataLoader[Any]) -> Callable[..., Any] | None:
    # With batch_size=None torch sets default_convert, which is not meant for lists of samples.
    return loader.collate_fn if loader.batch_size is not None or loader.batch_sampler is not None else None


def _adopt_order(loader: DataLoader[Any], given: Wanted) -> None:
    given.drop_last = given.drop_last or loader.drop_last
    if isinstance(loader.dataset, IterableDataset):
        given.global_batch_size = given.global_batch_size or loader.batch_size
        return
    if loader.batch_size is None and loader.batch_sampler is not None:
        given.batch_sampler = loader.batch_sampler
        return
    if loader.batch_size is None:
        raise UsageError(
            "AR130",
            "the DataLoader has batch_size=None: each sample is handed out by itself",
            why="a batch that is not a list of samples cannot be divided among ranks",
            fix="DataLoader(dataset, batch_size=...), or run.loader(dataset, global_batch_size=...)",
        )
    if given.global_batch_size is None:
        given.global_batch_size = loader.batch_size
        if isinstance(loader.sampler, DistributedSampler):
            # In a script for many ranks the batch size of such a loader is one rank's.
            given.global_batch_size *= loader.sampler.num_replicas
    if given.shuffle is None:
        given.sampler = loader.sampler


def _unwrap_samplers(wanted: Wanted, world_size: int) -> None:
    """Replace torch's own samplers by ours: one permutation for all ranks, and no rank-dependent part."""
    if type(wanted.batch_sampler) is BatchSampler:
        inner = wanted.batch_sampler
        if wanted.global_batch_size is None:
            per_rank = inner.sampler if isinstance(inner.sampler, DistributedSampler) else None
            wanted.global_batch_size = inner.batch_size * (per_rank.num_replicas if per_rank else 1)
        wanted.drop_last = wanted.drop_last or inner.drop_last
        wanted.sampler, wanted.batch_sampler = inner.sampler, None
    sampler = wanted.sampler
    if isinstance(sampler, DistributedSampler):
        _replace_distributed(sampler, wanted, world_size)
    elif isinstance(sampler, RandomSampler) and _is_a_permutation(sampler):
        if isinstance(sampler.generator, torch.Generator):
            wanted.seed = sampler.generator.initial_seed()
        wanted.shuffle, wanted.sampler = True, None
    elif type(sampler) is SequentialSampler:
        wanted.shuffle, wanted.sampler = wanted.shuffle or False, None


def _is_a_permutation(sampler: RandomSampler) -> bool:
    """torch's class itself, or torchdata's, which adds a state that we do not need; not a subclass of the user's."""
    kind = type(sampler)
    is_plain = kind is RandomSampler or kind.__module__.startswith("torchdata.")
    return is_plain and not sampler.replacement and sampler.num_samples == len(sampler.data_source)


def _replace_distributed(sampler: DistributedSampler[Any], wanted: Wanted, world_size: int) -> None:
    if type(sampler).__iter__ is not DistributedSampler.__iter__:
        raise UsageError(
            "AR136",
            f"the sampler {type(sampler).__name__} divides the data among ranks in its own way",
            why="run.loader divides too: each rank would get a part of a part",
            fix="a sampler of the whole data set, the same on every rank; or iterate your own DataLoader",
        )
    if sampler.num_replicas != world_size:
        raise UsageError(
            "AR135",
            f"the DistributedSampler has num_replicas={sampler.num_replicas}, the job has {world_size} ranks",
            why="samples would be left out or seen twice",
            fix="pass the data set itself: run.loader(dataset, shuffle=...)",
        )
    logger.info(
        "the DistributedSampler (shuffle=%s, seed=%d, drop_last=%s) is replaced by allranks' own order, which repeats no sample",
        sampler.shuffle,
        sampler.seed,
        sampler.drop_last,
    )
    wanted.shuffle, wanted.sampler = sampler.shuffle, None
    wanted.seed = sampler.seed
    wanted.drop_last = wanted.drop_last or sampler.drop_last
