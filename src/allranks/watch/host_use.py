"""How busy is this host, with this job or with others, how full is its /dev/shm, and do its links lose or hold back what is sent?

Read about once a second by the agent, outside the ranks: a few files of /proc, 0.1 ms; connections only where there are several nodes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from typing import Any

from allranks.watch import proc
from allranks.watch.gpu_use import Gpus
from allranks.watch.observed import Socket

_TICK_S = 1.0 / (os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100)
QUEUES_SHARE = 0.01
"""Of the time that may go into reading sockets: connections of a rank are found among all its descriptors, 5 ms and more."""
_IDLE = (3, 4)  # idle and iowait, of the first line of /proc/stat
_GUEST = 8  # guest times are in user's already


class HostUse:
    """Remembers what processes used that have ended."""

    def __init__(self, has_other_nodes: bool, gpus: Gpus | None = None) -> None:
        self._has_other_nodes, self._gpus = has_other_nodes, gpus or Gpus()
        self._used: dict[int, float] = {}
        self._most = 0.0
        self._shm_used: int | None = None
        self._queues: dict[str, Any] = {}
        self._next_queues = 0.0

    def peek(self) -> None:
        """How full /dev/shm is: batches come and go in it, so between two looks it is read ten times a second."""
        size, free = proc.space("/dev/shm")
        if size and free is not None:
            self._shm_used = max(self._shm_used or 0, size - free)

    def look(self, ranks: dict[int, int], workers: Iterable[int]) -> dict[str, Any]:
        """What there is to say now; what cannot be read is left out.

        Args:
            ranks: Rank -> pid.
            workers: Pids of their loader workers.
        """
        found: dict[str, Any] = {"job_cpu_s": round(self._of_job(ranks.values(), workers), 2)}
        if (busy_s := busy_of_host()) is not None:
            found["host_cpu_s"] = round(busy_s, 2)
        self.peek()
        if self._shm_used is not None:
            found["shm_used"], self._shm_used = self._shm_used, None  # the most since the look before
        pid = next(iter(ranks.values()), 0)
        if self._has_other_nodes and pid:
            found |= _segments(pid)
            if (now := time.monotonic()) >= self._next_queues:
                self._queues = _queues([s for p in ranks.values() for s in proc.sockets(p)])
                self._next_queues = now + (time.monotonic() - now) / QUEUES_SHARE
            found |= self._queues
        if gpus := self._gpus.look(ranks):
            found["gpus"] = gpus
        return found

    def _of_job(self, ranks: Iterable[int], workers: Iterable[int]) -> float:
        """Processor time of the ranks and of their children: what lives, and what was waited for.

        It never falls, though a child's time is seen nowhere between its end and the moment when its rank has waited for it.
        """
        living = set(workers)
        for pid in ranks:
            living.update(proc.children(pid))
            if (used := _ticks(pid, 4)) is not None:
                self._used[pid] = used
        alive = sum(_ticks(pid, 2) or 0.0 for pid in living)
        own = os.times()
        self._most = max(self._most, sum(self._used.values()) + alive + own.user + own.system)
        return self._most


def _queues(sockets: list[Socket]) -> dict[str, Any]:
    """What the connections hold back, in all and by the address of the other host."""
    held: dict[str, int] = {}
    for socket in sockets:
        if socket.tx_queue:
            peer = _host_of(socket.peer)
            held[peer] = held.get(peer, 0) + socket.tx_queue
    addresses = sorted({_host_of(s.own) for s in sockets})
    return {"queued": sum(held.values()), "held": held, "addresses": addresses}


def _host_of(address: str) -> str:
    return address.rpartition(":")[0]


def busy_of_host(text: str | None = None) -> float | None:
    """Seconds that all cores together were not idle, also for other virtual machines; None where that cannot be read."""
    fields = (text if text is not None else proc.read("/proc/stat")).partition("\n")[0].split()
    if len(fields) < 6 or fields[0] != "cpu":
        return None
    ticks = [int(field) for field in fields[1 : 1 + _GUEST]]
    return sum(t for k, t in enumerate(ticks) if k not in _IDLE) * _TICK_S


def _ticks(pid: int, count: int) -> float | None:
    """user, system (and, with 4, the same of ended children) of a process, in seconds."""
    text = proc.read(f"/proc/{pid}/stat")
    fields = text[text.rfind(")") + 2 :].split()
    return sum(map(int, fields[11 : 11 + count])) * _TICK_S if len(fields) > 15 else None


def _segments(pid: int) -> dict[str, int]:
    """TCP segments of this rank's network so far: sent, and sent once more."""
    lines = [
        line.split() for line in proc.read(f"/proc/{pid}/net/snmp").splitlines() if line.startswith("Tcp:")
    ]
    if len(lines) != 2:
        return {}
    of = dict(zip(*lines, strict=False))
    return {"sent": int(of.get("OutSegs", 0)), "resent": int(of.get("RetransSegs", 0))}
