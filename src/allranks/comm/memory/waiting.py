"""How does a rank wait for the others' counters in shared memory? A short look, then asleep in the kernel until the other posts.

Every rank has one counter, alone on its cache line, which only it writes. To post is to raise it and to wake who sleeps on it
(futex). Spinning for long would take the core from the very rank that is waited for, so a rank looks a few times, gives its core
away between, and then sleeps; it wakes up now and then to see whether the other still lives.

Each waiter relies on another core seeing writes in the order in which they were made: so on x86-64, not everywhere on ARM.
"""

from __future__ import annotations

import ctypes
import os
import select
import time
import weakref
from mmap import mmap

from allranks.core.errors import CommError

LINE_BYTES = 64
_FUTEX_WAIT, _FUTEX_WAKE, _SYS_FUTEX = (
    0,
    1,
    202,
)  # x86-64; not FUTEX_PRIVATE: the word is another process' too
_MASK, _HALF = 0xFFFFFFFF, 0x80000000
# Each with sched_yield. 0, 5 and 40 did not differ on a busy machine (tiny, 2 and 4 ranks on 2 cores, 2026-11-29); 1000 looks without
# giving the core away cost 4 ranks a quarter more.
_LOOKS = 40
_SLICE_S = 0.02  # asleep between two looks at whether the other lives
_LEFT = 1  # in the word after the counter

_open: weakref.WeakSet[Counters] = weakref.WeakSet()


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


class Counters:
    """One counter per rank at the beginning of `memory`.

    Args:
        memory: Shared by the ranks; the first `LINE_BYTES` per rank are used, and are zero at the start.
        rank: This process.
        process_fds: By rank, a pidfd of its process; -1 for this one.
        timeout_s: Longest wait for another rank.
        names: What these ranks are called in messages, where they are some of the job's.
    """

    def __init__(
        self,
        memory: mmap,
        rank: int,
        process_fds: list[int],
        timeout_s: float,
        names: list[int] | None = None,
    ) -> None:
        world_size = len(process_fds)
        self.rank, self.timeout_s = rank, timeout_s
        self.names = names or list(range(world_size))
        self.others = [r for r in range(world_size) if r != rank]
        self._words = memoryview(memory)[: world_size * LINE_BYTES].cast("I")
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._step = LINE_BYTES // 4
        self._mine = rank * self._step
        self._places = [r * self._step for r in self.others]
        self._syscall = ctypes.CDLL(None, use_errno=True).syscall
        self._slice = _Timespec(0, int(_SLICE_S * 1e9))
        self._wake_args = (
            ctypes.c_long(_SYS_FUTEX),
            ctypes.c_void_p(self._base + 4 * self._mine),
            ctypes.c_int(_FUTEX_WAKE),
            ctypes.c_int(0x7FFFFFFF),
            None,
            None,
            ctypes.c_int(0),
        )
        self._fds = process_fds
        self._poll = select.poll()
        self._ranks_by_fd = {fd: r for r, fd in enumerate(process_fds) if fd >= 0}
        for fd in self._ranks_by_fd:
            self._poll.register(fd, select.POLLIN)  # readable once the process has ended, also as a zombie
        weakref.finalize(self, _close, list(self._ranks_by_fd))
        _open.add(self)

    def post(self, value: int) -> None:
        """Raise this rank's counter to `value`: what it wrote before can be read by the others now."""
        self._words[self._mine] = value & _MASK
        self._syscall(*self._wake_args)

    def wait_all(self, value: int) -> None:
        """Wait until every rank's counter is at `value` or beyond it.

        Raises:
            CommError: AR050 a rank ended or left before that, AR051 the time is over.
        """
        words = self._words
        for place in self._places:
            if (words[place] - value) & _MASK >= _HALF:
                self._wait(place, value)

    def leave(self) -> None:
        """Say that this rank will post no more."""
        self._words[self._mine + 1] = _LEFT
        self._syscall(*self._wake_args)

    def _wait(self, place: int, value: int) -> None:
        words, give_away = self._words, os.sched_yield
        for _ in range(_LOOKS):
            give_away()
            if (words[place] - value) & _MASK < _HALF:
                return
        deadline = time.monotonic() + self.timeout_s
        rank = place // self._step
        while True:
            seen = words[place]
            if (seen - value) & _MASK < _HALF:
                return
            gone = words[place + 1] == _LEFT or self._has_ended(rank)
            if gone and (words[place] - value) & _MASK >= _HALF:  # it may have posted, then ended
                raise self._ended(rank)
            if time.monotonic() > deadline:
                raise self._late(value)
            self._sleep(place, seen)

    def _sleep(self, place: int, seen: int) -> None:
        """Until the counter at `place` is no longer `seen`, a signal comes, or a slice of time is over."""
        self._syscall(
            ctypes.c_long(_SYS_FUTEX),
            ctypes.c_void_p(self._base + 4 * place),
            ctypes.c_int(_FUTEX_WAIT),
            ctypes.c_uint(seen),
            ctypes.byref(self._slice),
            None,
            ctypes.c_int(0),
        )

    def _has_ended(self, rank: int) -> bool:
        return any(self._ranks_by_fd[fd] == rank for fd, _ in self._poll.poll(0))

    def _ended(self, place: int) -> CommError:
        rank = self.names[place]
        return CommError(
            "AR050",
            f"rank {rank} ended while rank {self.names[self.rank]} waited for its gradients: Connection closed by peer",
            why=f"the process of rank {rank} has ended, or has left its run; this rank only felt it",
            fix=f"read what rank {rank} printed: the cause is there, not here",
        )

    def _late(self, value: int) -> CommError:
        words = self._words
        late = [
            r for r, p in zip(self.others, self._places, strict=True) if (words[p] - value) & _MASK >= _HALF
        ]
        who = f"rank{'s' * (len(late) != 1)} {', '.join(str(self.names[r]) for r in late)}"
        return CommError(
            "AR051",
            f"Timed out waiting {self.timeout_s * 1e3:.0f} ms for recv of the gradients of {who}",
            why=f"{who} did not come to this backward's all-reduce, in which rank {self.names[self.rank]} waited",
            fix=f"see where {who} stands (allranks watch); a larger timeout_s only if it is really at work",
        )


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def leave_all() -> None:
    """Tell all ranks that wait for this one that it goes: what a closed connection says of a rank whose process lives on."""
    for counters in list(_open):
        counters.leave()
