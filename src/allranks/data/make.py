"""How is a loader put together from what the user has?"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch

from allranks.data.batch import MicroBatch
from allranks.data.checks import (
    check_not_empty,
    check_num_workers,
    check_orders,
    check_sizes,
    warn_of_dropped_evaluation,
    warn_of_small_batch,
)
from allranks.data.loader import Engine, Plan, RankLoader
from allranks.data.order import BatchSamplerOrder, Order, SamplerOrder, WholeOrder
from allranks.data.samples import SampleEngine
from allranks.data.settings import Wanted, understand
from allranks.data.tensors import TensorEngine, is_free_of_randomness, is_tensors
from allranks.data.worker_count import auto_num_workers


def make_loader(
    source: Any,
    *,
    rank: int = 0,
    world_size: int = 1,
    local_world_size: int = 1,
    device: torch.device | str = "cpu",
    seed: int = 0,
    global_batch_size: int | None = None,
    accumulation_steps: int = 1,
    micro_batch_size: int | None = None,
    shuffle: bool | None = None,
    train: bool | None = None,
    drop_last: bool = False,
    num_workers: int | Literal["auto"] | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    worker_init_fn: Callable[[int], Any] | None = None,
    sampler: Iterable[Any] | None = None,
    batch_sampler: Iterable[Any] | None = None,
    pin_memory: bool | None = None,
    persistent_workers: bool | None = None,
    prefetch_factor: int | None = None,
    epoch_of: Callable[[], int] | None = None,
    on_batch: Callable[[MicroBatch], None] | None = None,
    on_end: Callable[[], None] | None = None,
    name: str = "",
) -> RankLoader:
    """This rank's part of a data set, or of what an existing DataLoader gives.

    Not a collective, but all ranks must pass the same.
    """
    check_sizes(global_batch_size, accumulation_steps, micro_batch_size)
    check_num_workers("auto" if num_workers is None else num_workers)
    asked = Wanted(
        dataset=None,
        global_batch_size=global_batch_size,
        shuffle=shuffle,
        drop_last=drop_last,
        sampler=sampler,
        batch_sampler=batch_sampler,
        seed=seed,
        train=train,
        num_workers=num_workers if isinstance(num_workers, int) else None,
        collate_fn=collate_fn,
        worker_init_fn=worker_init_fn,
        pin_memory=pin_memory,
        persistent_workers=persistent_workers,
        prefetch_factor=prefetch_factor,
    )
    check_orders(asked)
    wanted = understand(source, world_size, asked)
    device = torch.device(device)
    order = _order(wanted)
    check_not_empty(wanted, order.num_batches())
    if wanted.is_training():
        warn_of_small_batch(wanted.global_batch_size, world_size)
    warn_of_dropped_evaluation(wanted)
    plan = Plan(
        rank=rank,
        world_size=world_size,
        global_batch_size=wanted.global_batch_size,
        accumulation_steps=accumulation_steps,
        micro_batch_size=micro_batch_size,
        stand_ins=wanted.is_training(),
    )
    return RankLoader(
        dataset=wanted.dataset,
        order=order,
        plan=plan,
        engine=_engine(wanted, rank, local_world_size, device),
        device=device,
        seed=wanted.seed,
        is_training=wanted.is_training(),
        epoch_of=epoch_of,
        on_batch=on_batch,
        on_end=on_end,
        name=name,
    )


def _order(wanted: Wanted) -> Order:
    if wanted.batch_sampler is not None:
        return BatchSamplerOrder(wanted.batch_sampler, seed=wanted.seed)
    assert wanted.global_batch_size is not None
    if wanted.sampler is not None:
        return SamplerOrder(
            wanted.sampler, wanted.global_batch_size, seed=wanted.seed, drop_last=wanted.drop_last
        )
    return WholeOrder(
        len(wanted.dataset),
        wanted.global_batch_size,
        seed=wanted.seed,
        is_shuffled=bool(wanted.shuffle),
        drop_last=wanted.drop_last,
    )


def _engine(wanted: Wanted, rank: int, local_world_size: int, device: torch.device) -> Engine:
    in_memory = is_free_of_randomness(wanted.dataset)
    if is_tensors(wanted.dataset, wanted.collate_fn) and not wanted.num_workers:
        return TensorEngine(wanted.dataset)
    num_workers = wanted.num_workers
    if num_workers is None:
        num_workers = 0 if in_memory else auto_num_workers(local_world_size, device.type)
    settings = wanted.settings(num_workers, device)
    return SampleEngine(wanted.dataset, settings, seed=wanted.seed, rank=rank, is_seeded=not in_memory)
