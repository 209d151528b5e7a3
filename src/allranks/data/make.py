"""How is a loader put together from what the user has?"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch

from allranks.core.cores import usable_cores
from allranks.core.overrides import is_overridden, overridden
from allranks.data.agree import Exchange
from allranks.data.batch import MicroBatch
from allranks.data.checks import (
    check_not_empty,
    check_num_workers,
    check_orders,
    check_picklable,
    check_sharded,
    check_sizes,
    warn_of_dropped_evaluation,
    warn_of_small_batch,
)
from allranks.data.division import division_of
from allranks.data.loader import RankLoader, Source
from allranks.data.map_source import Engine, MapSource
from allranks.data.order import BatchSamplerOrder, Order, SamplerOrder, WholeOrder
from allranks.data.plan import Plan
from allranks.data.samples import SampleEngine
from allranks.data.settings import understand
from allranks.data.stream_reader import StreamReader
from allranks.data.stream_source import StreamSource
from allranks.data.tensors import TensorEngine, is_free_of_randomness, is_tensors
from allranks.data.wanted import Wanted
from allranks.data.worker_count import auto_num_workers

logger = logging.getLogger(__name__)


def make_loader(
    source: Any,
    *,
    rank: int = 0,
    world_size: int = 1,
    num_cores: float | None = None,
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
    multiprocessing_context: Any = None,
    timeout_s: float = 0,
    sharded: bool | None = None,
    exchange: Exchange | Literal["auto"] | None = "auto",
    epoch_of: Callable[[], int] | None = None,
    on_batch: Callable[[MicroBatch], None] | None = None,
    on_end: Callable[[], None] | None = None,
    name: str = "",
) -> RankLoader:
    """This rank's part of a data set, or of what an existing DataLoader gives, on this rank's device.

    Global batch g is the g-th slice of one order of the data set, the same on any number of ranks; each rank takes its
    share of it. Not a collective: only iterating is, in training. All ranks must pass the same arguments but `rank`.

    Args:
        source: A data set with indices, an iterable data set, or a DataLoader, whose settings are kept where no argument
            here says otherwise.
        rank: This rank.
        world_size: Ranks that share the data.
        num_cores: Of this rank, for num_workers="auto"; all that this process may use if not given.
        device: Where batches arrive. On CUDA they are copied one batch ahead from pinned memory.
        seed: Of orders, workers and augmentation; the same on all ranks.
        global_batch_size: Samples per update over all ranks; a DataLoader's batch_size if not given.
        accumulation_steps: Micro-batches of a full global batch.
        micro_batch_size: Most samples of a rank in one forward, instead of accumulation_steps.
        shuffle: One permutation per epoch from (seed, epoch).
        train: False: evaluation, each sample once, ranks may get different numbers of batches. If not given: True with shuffle, a
            sampler, a batch sampler or an iterable data set.
        drop_last: Leave out the last global batch if it is not full; otherwise it is an update of its true size.
        num_workers: Loader workers of this rank; "auto" from the cores it may use. If not given: a DataLoader's, else "auto".
        collate_fn: Makes a batch of a list of samples; torch's default_collate if not given.
        worker_init_fn: Called in each worker with its index, after torch, random and numpy are seeded.
        sampler: An order of indices; read on every rank under generators seeded alike. It may be infinite.
        batch_sampler: Each of its batches is a global batch.
        pin_memory: False: no pinned memory on CUDA.
        persistent_workers: Keep workers between epochs; if not given, for data sets with indices.
        prefetch_factor: Micro-batches each worker reads ahead.
        multiprocessing_context: How workers are started, "fork", "spawn" or "forkserver".
        timeout_s: Seconds to wait for a worker; 0 without end.
        sharded: Iterable data sets: True, it divides itself over ranks and workers; False, it does not. If not given, its code is
            looked at.
        exchange: Gathers a number of every rank, for ranks to compare their data; "auto": in the default process group, if there is
            one; None: nothing is compared.
        epoch_of: Gives the epoch; if not given it goes up with each iteration.
        on_batch: Called with the micro-batch right before it is handed out.
        on_end: Called when an iteration has ended or was left.
        name: For messages.

    Raises:
        UsageError: AR130 to AR140, AR144: what was asked for cannot be; the message says what to pass instead.
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
        num_workers=num_workers,
        collate_fn=collate_fn,
        worker_init_fn=worker_init_fn,
        pin_memory=pin_memory,
        persistent_workers=persistent_workers,
        prefetch_factor=prefetch_factor,
        timeout_s=timeout_s,
        multiprocessing_context=multiprocessing_context,
    )
    check_orders(asked)
    wanted = understand(source, world_size, asked)
    check_sharded(wanted, sharded)
    device = torch.device(device)
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
    _say_fewer_steps(plan)
    make = _stream_source if wanted.is_iterable else _map_source
    cores = usable_cores() if num_cores is None else num_cores
    return RankLoader(
        make(wanted, plan, cores, device, sharded, exchange),
        dataset=wanted.dataset,
        device=device,
        seed=wanted.seed,
        is_training=wanted.is_training(),
        epoch_of=epoch_of,
        on_batch=on_batch,
        on_end=on_end,
        exchange=exchange,
        name=name,
    )


def _say_fewer_steps(plan: Plan) -> None:
    size, steps = plan.global_batch_size, plan.accumulation_steps
    if size is None or plan.micro_batch_size is not None or (num_micro := plan.parts(size)[0]) == steps:
        return
    logger.info(
        "accumulation_steps=%d: a global batch of %d on %d ranks makes %d micro-batches of at most %d",
        steps,
        size,
        plan.world_size,
        num_micro,
        plan.micro_size(size),
    )


def _map_source(
    wanted: Wanted, plan: Plan, num_cores: float, device: torch.device, sharded: object, exchange: object
) -> Source:
    order = _order(wanted)
    check_not_empty(wanted, order.num_batches())
    return MapSource(order, plan, _engine(wanted, plan.rank, num_cores, device), seed=wanted.seed)


def _stream_source(
    wanted: Wanted,
    plan: Plan,
    num_cores: float,
    device: torch.device,
    sharded: bool | None,
    exchange: Exchange | Literal["auto"] | None,
) -> Source:
    division = division_of(wanted.dataset, sharded)
    num_workers = _num_workers(wanted, num_cores, device)
    if division == "whole":
        num_workers = _in_effect(wanted, num_workers)
    else:
        _say_untouched(wanted, "its data set divides itself among workers: another number, other batches")
    check_picklable(wanted, num_workers)
    settings = wanted.settings(num_workers, device)
    if sharded is None:
        logger.info(
            "the iterable data set %s is taken %s (sharded=True or False says otherwise)",
            type(wanted.dataset).__name__,
            "to be the same on every rank: each takes its share of it"
            if division == "whole"
            else "to divide itself, since its code looks at "
            + ("the worker" if division == "as workers" else "the rank"),
        )
    has_state = all(callable(getattr(wanted.dataset, m, None)) for m in ("state_dict", "load_state_dict"))
    reader = StreamReader(
        wanted.dataset,
        settings.collate_fn,
        plan,
        division,
        seed=wanted.seed,
        drop_last=wanted.drop_last,
        can_save=has_state and (division == "whole" or num_workers == 0),
    )
    return StreamSource(reader, plan, settings, is_declared=sharded is not None, exchange=exchange)


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


def _engine(wanted: Wanted, rank: int, num_cores: float, device: torch.device) -> Engine:
    is_quiet = is_free_of_randomness(wanted.dataset)
    asks_for_workers = isinstance(wanted.num_workers, int) and wanted.num_workers > 0
    if is_tensors(wanted.dataset, wanted.collate_fn) and not asks_for_workers:
        pinned = device.type == "cuda" and wanted.pin_memory is not False
        _say_untouched(wanted, "its batches are cut from tensors in memory, without workers")
        return TensorEngine(wanted.dataset, pin_memory=pinned)
    # Tensors in memory: sending a batch to another process costs more than cutting it.
    num_workers = 0 if is_quiet and not asks_for_workers else _num_workers(wanted, num_cores, device)
    num_workers = _in_effect(wanted, num_workers)
    check_picklable(wanted, num_workers)
    settings = wanted.settings(num_workers, device)
    return SampleEngine(wanted.dataset, settings, rank=rank, is_seeded=not is_quiet)


def _num_workers(wanted: Wanted, num_cores: float, device: torch.device) -> int:
    if isinstance(wanted.num_workers, int):
        return wanted.num_workers
    return auto_num_workers(num_cores, device.type)


def _in_effect(wanted: Wanted, num_workers: int) -> int:
    """The workers of a loader whose batches do not depend on their number: those of `--set` in place of its own, in training."""
    if not wanted.is_training():
        return num_workers
    num_workers = overridden("num_workers", num_workers)
    if num_workers:
        wanted.prefetch_factor = overridden("prefetch_factor", wanted.prefetch_factor or 2)  # 2: torch's own
    return num_workers


def _say_untouched(wanted: Wanted, why: str) -> None:
    if wanted.is_training() and is_overridden("num_workers"):
        logger.info(
            "--set num_workers does not change a loader of %s: %s", type(wanted.dataset).__name__, why
        )
