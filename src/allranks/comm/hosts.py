"""How do ranks of several hosts add up, so that only one rank of a host uses the network? Memory, network, memory.

    add_up   every rank writes its values into its host's memory, each adds up its part of them, in rank order
    (the first rank of each host, its leader, then exchanges the sums with the other leaders)
    spread   the leader writes what came of it, the others copy it

All ranks end with the leader's bits. Hosts are told apart as in memory/opening.py: by the kernel, by the network namespace, and by
trying; if one host's ranks cannot share memory, all ranks go over the network, each for itself.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from mmap import mmap
from typing import Any

import torch
import torch.distributed as dist

from allranks.comm import values
from allranks.comm.memory.opening import born, group_timeout_s, network
from allranks.comm.memory.summing import ALIGN
from allranks.comm.memory.waiting import LINE_BYTES, Counters
from allranks.core.cores import affinity, is_core_for_each, usable_cores

MAX_ROOM_BYTES = 64 << 20  # per rank; larger models go through it in turns
_TOKEN_BYTES = 16
_groups: weakref.WeakKeyDictionary[Any, dict[tuple[int, ...], Any]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class Apart:
    """Why ranks exchange each for itself."""

    reason: str


class Hosts:
    """The ranks of this host, and the leaders of all hosts.

    Args:
        ranks: Of this host, in order; the first is its leader.
        leaders: Of all hosts, in order.
        memory: Shared by this host's ranks; None for a rank alone on its host.
        fds: By place in `ranks`, a pidfd of its process; -1 for this one.
        room_bytes: For each rank, and for the sum, between two waits.
        has_core: Whether every rank of this host has a core of its own.
    """

    def __init__(
        self,
        ranks: list[int],
        leaders: list[int],
        memory: mmap | None,
        fds: list[int],
        room_bytes: int,
        *,
        has_core: bool,
    ) -> None:
        me = dist.get_rank()
        self.ranks, self.leaders, self.memory, self.room_bytes = ranks, leaders, memory, room_bytes
        self.is_leader = me == ranks[0]
        self.group = _group_of(leaders)
        self._place, self._posted = ranks.index(me), 0
        self._counters = (
            None
            if memory is None
            else Counters(memory, self._place, fds, group_timeout_s(), has_core=has_core, names=ranks)
        )

    def add_up(self, tensors: list[torch.Tensor]) -> None:
        """Put the sum over this host's ranks into the leader's tensors (1-d, contiguous, on a CPU). **Collective** on the host.

        Raises:
            CommError: AR050 a rank of this host is gone, AR051 the time is over.
        """
        if self._counters is None:
            return
        for turn in self._turns(tensors):
            for piece, slots, _ in turn:
                slots[self._place].copy_(piece)
            self._meet()
            for piece, slots, total in turn:
                low, high = (piece.numel() * (self._place + i) // len(self.ranks) for i in (0, 1))
                _sum([slot[low:high] for slot in slots], total[low:high])
            self._meet()
            if self.is_leader:
                for piece, _, total in turn:
                    piece.copy_(total)

    def spread(self, tensors: list[torch.Tensor]) -> None:
        """Give the leader's tensors to the other ranks of the host. **Collective** on the host; errors as add_up."""
        if self._counters is None:
            return
        for number, turn in enumerate(self._turns(tensors)):
            if number:
                self._meet()  # the others have read what was there before
            if self.is_leader:
                for piece, _, total in turn:
                    total.copy_(piece)
            self._meet()
            if not self.is_leader:
                for piece, _, total in turn:
                    piece.copy_(total)

    def _meet(self) -> None:
        counters = self._counters
        assert counters is not None
        self._posted += 1
        counters.post(self._posted)
        counters.wait_all(self._posted)

    def _turns(
        self, tensors: list[torch.Tensor]
    ) -> Iterator[list[tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]]]:
        """What fits into the memory at once: (piece, every rank's slot for it, the place of the sum)."""
        turn: list[tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]] = []
        used = 0
        for tensor in tensors:
            size, start = tensor.element_size(), 0
            while start < tensor.numel():
                if self.room_bytes - used < min((tensor.numel() - start) * size, ALIGN):
                    yield turn
                    turn, used = [], 0
                count = min(tensor.numel() - start, (self.room_bytes - used) // size)
                turn.append((tensor[start : start + count], *self._views(used, count, tensor.dtype)))
                used += -(-count * size // ALIGN) * ALIGN
                start += count
        if turn:
            yield turn

    def _views(self, offset: int, count: int, dtype: torch.dtype) -> tuple[list[torch.Tensor], torch.Tensor]:
        assert self.memory is not None
        begin = len(self.ranks) * LINE_BYTES + offset
        *slots, total = (
            torch.frombuffer(self.memory, dtype=dtype, count=count, offset=begin + i * self.room_bytes)
            for i in range(len(self.ranks) + 1)
        )
        return slots, total


def _sum(slots: list[torch.Tensor], into: torch.Tensor) -> None:
    """In rank order; half precision in float32."""
    wide = torch.float32 if into.dtype in (torch.float16, torch.bfloat16) else into.dtype
    total = slots[0].to(wide, copy=True)
    for slot in slots[1:]:
        total.add_(slot)
    into.copy_(total)


def _group_of(leaders: list[int]) -> Any:
    """The process group of the leaders; made once. Collective."""
    world: Any = dist.group.WORLD
    if len(leaders) == dist.get_world_size():
        return world
    known = _groups.setdefault(world, {})
    key = tuple(leaders)
    if key not in known:
        known[key] = dist.new_group(leaders, backend="gloo")
    return known[key]


def open_hosts(num_bytes: int, reason: str = "") -> Hosts | Apart:
    """This host's ranks with memory in common, for tensors of `num_bytes` together. **Collective**, the same answer on every rank.

    Args:
        num_bytes: Of all tensors of one step, alignment included.
        reason: Why this rank cannot take part, if it cannot.
    """
    me = dist.get_rank()
    room = max(ALIGN, -(-min(num_bytes, MAX_ROOM_BYTES) // ALIGN) * ALIGN)
    places = values.gather_objects(
        {
            "reason": reason,
            "host": _host(),
            "pid": os.getpid(),
            "born": born(os.getpid()),
            "cores": affinity(),
        }
    )
    refused = next((f"rank {r}: {p['reason']}" for r, p in enumerate(places) if p["reason"]), "")
    if refused:
        return Apart(refused)
    by_host: dict[Any, list[int]] = {}
    for rank, place in enumerate(places):
        by_host.setdefault(place["host"], []).append(rank)
    ranks, leaders = by_host[places[me]["host"]], sorted(r[0] for r in by_host.values())
    if len(leaders) == len(places):
        return Apart("every rank is alone on its host")
    if len(leaders) == 1:  # memory alone would do it; nobody is there to exchange with
        return Apart("all ranks are on one host")
    with contextlib.ExitStack() as stack:
        offer = _offer(len(ranks), room, stack) if me == ranks[0] and len(ranks) > 1 else {}
        offers = values.gather_objects(offer)
        memory, fds, problem = _take(offers[ranks[0]], ranks, places)
        problems = values.gather_objects(problem)  # the leaders' descriptors are open until all have answered
    refused = next((f"rank {r}: {p}" for r, p in enumerate(problems) if p), "")
    if refused:
        _close(fds)
        return Apart(refused)
    has_core = is_core_for_each([places[rank]["cores"] for rank in ranks], usable_cores())
    return Hosts(ranks, leaders, memory, fds, room, has_core=has_core)


def _host() -> tuple[str, str]:
    """Equal on ranks that may share memory: the kernel's boot and the network namespace."""
    return born(os.getpid())[:36], network()


def _offer(num_ranks: int, room: int, stack: contextlib.ExitStack) -> dict[str, Any]:
    """A leader's memory, open until `stack` ends; all of it is reserved, so too little is an error now."""
    size = num_ranks * LINE_BYTES + (num_ranks + 1) * room + _TOKEN_BYTES
    token = secrets.token_bytes(_TOKEN_BYTES)
    try:
        made = os.memfd_create("allranks", os.MFD_CLOEXEC)
        stack.callback(os.close, made)
        os.posix_fallocate(made, 0, size)
        os.pwrite(made, token, size - _TOKEN_BYTES)
    except OSError as error:
        return {"problem": f"{size >> 20} MB of shared memory: {error.strerror or error}"}
    return {"fd": made, "pid": os.getpid(), "size": size, "token": token}


def _take(
    offer: dict[str, Any], ranks: list[int], places: list[dict[str, Any]]
) -> tuple[mmap | None, list[int], str]:
    """The leader's memory, a pidfd of each other rank of this host, and what is wrong."""
    fds: list[int] = []
    if len(ranks) == 1:
        return None, [], ""
    if "problem" in offer:
        return None, [], offer["problem"]
    try:
        fd = os.open(f"/proc/{offer['pid']}/fd/{offer['fd']}", os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.pread(fd, _TOKEN_BYTES, offer["size"] - _TOKEN_BYTES) != offer["token"]:
                return None, [], f"rank {ranks[0]} is in another container"
            memory = mmap(fd, offer["size"])
        finally:
            os.close(fd)
        for rank in ranks:
            if rank == dist.get_rank():
                fds.append(-1)
                continue
            fds.append(os.pidfd_open(places[rank]["pid"]))
            if born(places[rank]["pid"]) != places[rank]["born"]:
                raise OSError(f"rank {rank} is in another container")
    except OSError as error:
        _close(fds)
        return None, [], f"{type(error).__name__}: {error}"
    return memory, fds, ""


def _close(fds: list[int]) -> None:
    for fd in fds:
        if fd >= 0:
            os.close(fd)
