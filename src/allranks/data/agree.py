"""Do all ranks go through the same data, and is there a next batch on any of them?

Both need one whole number of every rank. An `Exchange` starts to gather it and returns what waits for it, so the answer
is fetched while the loop trains on the batch before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import torch.distributed as dist

from allranks.core.errors import RanksDisagree
from allranks.data.randomness import mix

Exchange = Callable[[int], Callable[[], list[int]]]


def group_exchange(value: int) -> Callable[[], list[int]]:
    """Gather one number of every rank of the default group. **Collective**; the returned function waits."""
    # gloo takes CPU tensors; a group that is only NCCL's takes only those on the device.
    device = (
        "cpu" if "gloo" in dist.get_backend_config() else torch.device("cuda", torch.cuda.current_device())
    )
    mine = torch.tensor([value], dtype=torch.int64, device=device)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    work = dist.all_gather(every, mine, async_op=True)

    def wait() -> list[int]:
        if work is not None:
            work.wait()
        return [int(each) for each in every]

    return wait


def find_exchange(wished: Exchange | Literal["auto"] | None, world_size: int) -> Exchange | None:
    """The exchange to use now: as wished, or the default group's if its ranks are the loader's."""
    if world_size == 1:
        return None
    if wished != "auto":
        return wished
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() == world_size:
        return group_exchange
    return None


class SameData:
    """Compares, once per epoch of training, what the ranks go through; a difference names the first that differs.

    Args:
        facts: Names and numbers that must be the same on all ranks.
    """

    def __init__(self, exchange: Exchange, facts: dict[str, int | None], name: str) -> None:
        self._exchange, self._name = exchange, name
        # Seeds may have 64 bits, the exchange takes signed ones.
        self._facts = {key: -1 if value is None else value % 2**63 for key, value in facts.items()}
        self._wait = exchange(mix(*self._facts.values()))

    def finish(self) -> None:
        """Wait for the comparison. **Collective** with its beginning, and with the other ranks' if they differ.

        Raises:
            RanksDisagree: AR137.
        """
        hashes = self._wait()
        if len(set(hashes)) == 1:
            return
        for key, value in self._facts.items():
            values = self._exchange(value)()
            for rank, other in enumerate(values):
                if other != values[0]:
                    raise _disagreement(self._name, key, rank, values[0], other)
        raise AssertionError("hashes differ, but no fact does")


def _disagreement(name: str, key: str, rank: int, first: int, other: int) -> RanksDisagree:
    loader = f"loader {name}: " if name else "loader: "
    if key == "samples of the first batch":
        return RanksDisagree(
            "AR137",
            f"{loader}rank 0 and rank {rank} see different samples in the same global batch",
            why="each rank takes its share of one sequence, so the sequence must be the same on all; "
            "likely the sampler or data set was built differently on each rank, or shuffles with a seed of its own",
            fix="the same data set and sampler seeds on every rank; sharded=True for an iterable data set "
            "that gives each rank its own part",
        )
    return RanksDisagree(
        "AR137",
        f"{loader}{key} is {first} on rank 0 and {other} on rank {rank}",
        why="likely the data set was filtered, split or downloaded differently on that rank",
        fix="the same data set and the same arguments on every rank",
    )
