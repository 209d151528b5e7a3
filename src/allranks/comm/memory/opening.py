"""How do ranks come to one piece of memory, and how do they know that they are on one host? They try, and all must succeed.

Rank 0 makes memory without a name (memfd) and tells the others where it is: /proc/<its pid>/fd/<number>. Who can open it, and finds
the word in it that rank 0 chose, is on its host. There is never a file: when the last process that mapped it has ended, by whatever
signal, the memory is free. It does not count against the size of /dev/shm, which is 64 MB in many containers.
"""

from __future__ import annotations

import contextlib
import os
import platform
import secrets
import sys
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from allranks.comm import values
from allranks.comm.memory.summing import ALIGN, DTYPES, MemorySum
from allranks.comm.memory.waiting import LINE_BYTES, Counters
from allranks.core.cores import affinity, is_core_for_each, usable_cores

MAX_HALF_BYTES = 64 << 20  # per rank; larger models go through it in turns
_TOKEN_BYTES = 16
_DEFAULT_TIMEOUT_S = 1800.0  # torch's for gloo


@dataclass(frozen=True, slots=True)
class Refused:
    """Why the ranks have no memory in common."""

    reason: str
    is_one_host: bool = False  # then somebody may want to know


def why_not_here(parameters: list[torch.nn.Parameter], device: torch.device) -> str:
    """Why this rank's gradients could not go through memory wherever the others are; "" if they can."""
    if device.type != "cpu":
        return f"the model is on {device.type}"
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"{sys.platform} on {platform.machine()}: only on Linux on x86-64"
    if not hasattr(os, "pidfd_open") or not hasattr(os, "memfd_create"):
        return "this Python has no os.pidfd_open or os.memfd_create"
    odd = next((p for p in parameters if p.dtype not in DTYPES or p.device.type != "cpu"), None)
    if odd is not None:
        return f"a parameter is {str(odd.dtype).removeprefix('torch.')} on {odd.device.type}"
    if "gloo" not in dist.get_backend_config():
        return f"the group's backend is {dist.get_backend()}"
    return ""


def open_memory(num_bytes: int, reason: str = "") -> MemorySum | Refused:
    """Memory in which all ranks of the job average up to `num_bytes` between two waits. Collective, the same answer on every rank.

    Args:
        num_bytes: Of all tensors of one step, alignment included.
        reason: Why this rank cannot take part, if it cannot.
    """
    half_bytes = max(ALIGN, -(-min(num_bytes, MAX_HALF_BYTES) // ALIGN) * ALIGN)
    offer, made = _offer(reason, half_bytes)
    offers = values.gather_objects(offer)
    refused = next(((r, o["reason"]) for r, o in enumerate(offers) if o["reason"]), None)
    found: tuple[mmap, list[int]] | None = None
    with contextlib.ExitStack() as stack:
        if made is not None:
            stack.callback(os.close, made)
        mine = ""
        if refused is None:
            try:
                found = _take(offers)
            except OSError as error:
                mine = f"{type(error).__name__}: {error}"
        answers = values.gather_objects(mine)  # rank 0's descriptor is open until all have answered
    if refused is None:
        refused = next(((r, a) for r, a in enumerate(answers) if a), None)
    if refused is not None:
        if found is not None:
            found[0].close()
            for fd in found[1]:
                if fd >= 0:
                    os.close(fd)
        is_one_host = len({(o["network"], o["born"][:36]) for o in offers}) == 1
        return Refused(f"rank {refused[0]}: {refused[1]}", is_one_host)
    assert found is not None
    memory, fds = found
    has_core = is_core_for_each([o["cores"] for o in offers], usable_cores())
    counters = Counters(memory, dist.get_rank(), fds, group_timeout_s(), has_core=has_core)
    return MemorySum(memory, counters, half_bytes)


def _offer(reason: str, half_bytes: int) -> tuple[dict[str, Any], int | None]:
    """What this rank tells of itself; rank 0 also makes the memory."""
    offer: dict[str, Any] = {
        "reason": reason,
        "pid": os.getpid(),
        "born": born(os.getpid()),
        "network": network(),
        "cores": affinity(),
    }
    if reason or dist.get_rank() != 0:
        return offer, None
    world_size = dist.get_world_size()
    size = world_size * (LINE_BYTES + 2 * half_bytes) + _TOKEN_BYTES
    token = secrets.token_bytes(_TOKEN_BYTES)
    made = -1
    try:
        made = os.memfd_create("allranks", os.MFD_CLOEXEC)
        os.posix_fallocate(made, 0, size)  # too little memory is an error now, and no bus error later
        os.pwrite(made, token, size - _TOKEN_BYTES)
    except OSError as error:
        if made >= 0:
            os.close(made)
        return offer | {"reason": f"{size >> 20} MB of shared memory: {error.strerror or error}"}, None
    return offer | {"fd": made, "size": size, "token": token}, made


def _take(offers: list[dict[str, Any]]) -> tuple[mmap, list[int]]:
    """The memory that rank 0 offers, and a pidfd of each other rank.

    Raises:
        OSError: One of them is not on this host, or cannot be seen from here.
    """
    zero = offers[0]
    # Containers and simulated hosts on one kernel: who gave them networks of their own wants them to be apart.
    apart = next((r for r, o in enumerate(offers) if o["network"] != zero["network"]), None)
    if apart is not None:
        raise OSError(f"rank {apart} is not in the network namespace of rank 0")
    fd = os.open(f"/proc/{zero['pid']}/fd/{zero['fd']}", os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.pread(fd, _TOKEN_BYTES, zero["size"] - _TOKEN_BYTES) != zero["token"]:
            raise OSError("rank 0 is on another host")
        memory = mmap(fd, zero["size"])
    finally:
        os.close(fd)
    fds: list[int] = []
    try:
        for rank, other in enumerate(offers):
            if rank == dist.get_rank():
                fds.append(-1)
                continue
            fds.append(os.pidfd_open(other["pid"]))
            if born(other["pid"]) != other["born"]:
                raise OSError(f"rank {rank} is in another container")
    except OSError:
        memory.close()
        for opened in fds:
            if opened >= 0:
                os.close(opened)
        raise
    return memory, fds


def born(pid: int) -> str:
    """What no other process on any host has: the kernel's boot, and the tick at which this one began."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        return (
            Path("/proc/sys/kernel/random/boot_id").read_text().strip() + stat.rpartition(")")[2].split()[19]
        )
    except OSError:
        return ""


def network() -> str:
    """The network namespace of this process."""
    try:
        return str(Path("/proc/self/ns/net").readlink())
    except OSError:
        return ""


def group_timeout_s() -> float:
    """The group's timeout; torch has no public name for reading it."""
    try:
        group: Any = dist.group.WORLD
        return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    except (AttributeError, RuntimeError):
        return _DEFAULT_TIMEOUT_S
