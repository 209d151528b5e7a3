"""Which private names of torch does this layer use, and what if they go away?

torch.utils.data._utils.worker._worker_info   what get_worker_info() returns; without it AR144
WorkerInfo is frozen                          written past that; without it the worker says our reader is its data set
iterator._shutdown_workers, loader._iterator  end loader workers now; without them the garbage collector does later
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from allranks.core.errors import UsageError

try:
    import torch.utils.data._utils.worker as torch_worker
except ImportError:  # torch has moved it
    torch_worker = None


@contextlib.contextmanager
def presented_as_worker(worker: int, num_workers: int, dataset: Any) -> Iterator[None]:
    """Inside, get_worker_info() says that this process is one of several workers: a data set that divides itself over
    workers then divides itself over ranks."""
    if num_workers == 1:
        yield
        return
    if torch_worker is None or not hasattr(torch_worker, "_worker_info"):
        raise UsageError(
            "AR144",
            f"num_workers=0 cannot be kept for {type(dataset).__name__}, which divides itself over workers",
            why=f"torch {torch.__version__} has no place where allranks can tell it which part is this rank's",
            fix="num_workers=1 or more, or sharded=False",
        )
    before = torch_worker._worker_info
    torch_worker._worker_info = torch_worker.WorkerInfo(
        id=worker, num_workers=num_workers, seed=torch.initial_seed(), dataset=dataset
    )
    try:
        yield
    finally:
        torch_worker._worker_info = before


def change_worker_info(info: Any, **fields: Any) -> None:
    """Change what get_worker_info() says in this worker."""
    for name, value in fields.items():
        object.__setattr__(info, name, value)


def shut_down(loader: DataLoader[Any], iterator: Any) -> None:
    """End the workers of an iterator; those that do not answer are left after 5 s."""
    if callable(end := getattr(iterator, "_shutdown_workers", None)):
        end()
    if getattr(loader, "_iterator", None) is not None:
        loader._iterator = None
