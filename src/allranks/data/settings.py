"""What does the user want of the loader: what was passed, and what a DataLoader of their own already says?"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from allranks.core.errors import UsageError
from allranks.data.checks import check_dataset, check_global_batch_size
from allranks.data.wanted import Wanted

logger = logging.getLogger(__name__)


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
