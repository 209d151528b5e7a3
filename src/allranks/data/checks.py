"""Can what the user asks of a loader be done? What cannot is an error with the names and values."""

from __future__ import annotations

import multiprocessing
import pickle
from typing import Any

from allranks.core.errors import UsageError, warn_once
from allranks.data.wanted import Wanted


def check_dataset(wanted: Wanted) -> None:
    """AR139, AR140: something that can be read, with arguments that have a meaning for it."""
    dataset = wanted.dataset
    if wanted.is_iterable:
        if not hasattr(dataset, "__iter__"):
            raise UsageError(
                "AR139",
                f"a {type(dataset).__name__} is no data set",
                why="it has neither __getitem__ nor __iter__",
                fix="a torch Dataset, an IterableDataset, a sequence, or a DataLoader",
            )
        given = [
            name
            for name, value in (
                ("shuffle", wanted.shuffle),
                ("sampler", wanted.sampler),
                ("batch_sampler", wanted.batch_sampler),
            )
            if value
        ]
        if given:
            raise UsageError(
                "AR140",
                f"{given[0]} was given for the iterable data set {type(dataset).__name__}",
                why="its order is its own: samples come one after the other",
                fix="shuffle inside the data set, with random, numpy or torch: they are seeded alike on all ranks",
            )
        return
    if not hasattr(dataset, "__len__") and wanted.sampler is None and wanted.batch_sampler is None:
        raise UsageError(
            "AR139",
            f"the data set {type(dataset).__name__} has __getitem__ but no __len__",
            why="without its length there is no order to divide",
            fix="add __len__, or give a sampler",
        )


def check_sharded(wanted: Wanted, sharded: bool | None) -> None:
    """AR140: `sharded` says something about iterable data sets only."""
    if sharded is not None and not wanted.is_iterable:
        raise UsageError(
            "AR140",
            f"sharded={sharded} was given for {type(wanted.dataset).__name__}, which has indices",
            why="allranks divides such a data set by its indices; it cannot divide itself",
            fix="leave sharded out, and give every rank the whole data set",
        )


def check_sizes(global_batch_size: int | None, accumulation_steps: int, micro_batch_size: int | None) -> None:
    """AR131, AR132: numbers of samples that can be."""
    for name, value in (
        ("global_batch_size", global_batch_size),
        ("accumulation_steps", accumulation_steps),
        ("micro_batch_size", micro_batch_size),
    ):
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UsageError("AR131", f"{name}={value!r}", fix=f"{name}: a whole number of at least 1")
    if micro_batch_size is not None and accumulation_steps != 1:
        raise UsageError(
            "AR132",
            f"micro_batch_size={micro_batch_size} and accumulation_steps={accumulation_steps} were both given",
            why="one follows from the other and the global batch size",
            fix="give one of them",
        )


def check_orders(wanted: Wanted) -> None:
    """AR132: one order, not two."""
    if wanted.shuffle and (wanted.sampler is not None or wanted.batch_sampler is not None):
        raise UsageError(
            "AR132",
            f"shuffle=True and a {'sampler' if wanted.sampler is not None else 'batch_sampler'} were both given",
            why="each is an order of its own",
            fix="leave out shuffle, or the sampler",
        )
    if wanted.batch_sampler is not None:
        for name, value in (("sampler", wanted.sampler), ("drop_last", wanted.drop_last or None)):
            if value is not None:
                raise UsageError(
                    "AR132",
                    f"batch_sampler and {name} were both given",
                    why="a batch sampler decides alone what a batch is",
                    fix=f"leave out {name}",
                )


def check_num_workers(num_workers: object) -> None:
    """AR131: "auto" or a number."""
    if num_workers != "auto" and (
        isinstance(num_workers, bool) or not isinstance(num_workers, int) or num_workers < 0
    ):
        raise UsageError("AR131", f"num_workers={num_workers!r}", fix='num_workers: "auto", or 0 or more')


def check_global_batch_size(wanted: Wanted) -> None:
    """AR130, AR132: a global batch size, from somewhere, once."""
    if wanted.batch_sampler is not None and wanted.global_batch_size is not None:
        raise UsageError(
            "AR132",
            f"global_batch_size={wanted.global_batch_size} and a batch_sampler were both given",
            why="each batch of a batch sampler is a global batch, with the size it has",
            fix="leave out global_batch_size, or the batch_sampler",
        )
    if wanted.batch_sampler is None and wanted.global_batch_size is None:
        raise UsageError(
            "AR130",
            "the loader has no batch size",
            fix="global_batch_size=... (samples per update over all ranks), or a DataLoader with a batch_size",
        )


def check_not_empty(wanted: Wanted, num_batches: int | None) -> None:
    """AR133: at least one batch."""
    if num_batches != 0 or (not wanted.is_training() and not wanted.drop_last):
        return
    length = len(wanted.dataset) if hasattr(wanted.dataset, "__len__") else 0
    raise UsageError(
        "AR133",
        f"the loader has no batch: {length} samples, global_batch_size={wanted.global_batch_size}, "
        f"drop_last={wanted.drop_last}",
        fix="a data set with samples" if length == 0 else "a smaller global_batch_size, or drop_last=False",
    )


def warn_of_small_batch(global_batch_size: int | None, world_size: int) -> None:
    """AR134: some ranks never have a sample."""
    if global_batch_size is not None and global_batch_size < world_size:
        warn_once(
            "AR134",
            f"global_batch_size={global_batch_size} is less than the {world_size} ranks: "
            f"{world_size - global_batch_size} of them only repeat rank 0's work, counted as nothing; "
            f"a global_batch_size of at least {world_size} gives each rank a sample",
        )


def warn_of_dropped_evaluation(wanted: Wanted) -> None:
    """AR145: samples left out of an evaluation."""
    if wanted.drop_last and not wanted.is_training() and not wanted.is_iterable and wanted.global_batch_size:
        left_out = len(wanted.dataset) % wanted.global_batch_size
        if left_out:
            warn_once(
                "AR145",
                f"drop_last=True leaves {left_out} of {len(wanted.dataset)} samples out of the evaluation; "
                "without drop_last each sample counts once, on any number of ranks",
            )


def check_picklable(wanted: Wanted, num_workers: int) -> None:
    """AR138: with spawned workers, functions that can be sent to them."""
    if num_workers == 0:
        return
    context = wanted.multiprocessing_context
    method = context if isinstance(context, str) else getattr(context, "_start_method", None)
    if (method or multiprocessing.get_start_method()) == "fork":
        return
    for name, value in (("collate_fn", wanted.collate_fn), ("worker_init_fn", wanted.worker_init_fn)):
        if value is None:
            continue
        try:
            pickle.dumps(value)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise UsageError(
                "AR138",
                f"{name}={_name(value)} cannot be sent to the loader workers: {error}",
                why=f"workers are started by {method or multiprocessing.get_start_method()}, which pickles it",
                fix="a function at the top level of a module, or num_workers=0",
            ) from error


def _name(value: Any) -> str:
    return getattr(value, "__qualname__", type(value).__name__)
