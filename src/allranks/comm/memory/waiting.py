"""How does a rank wait for the others' counters in shared memory? A short look, then asleep in the kernel until the other posts.

Every rank has one line of the cache: its counter, which only it writes, and whether somebody sleeps on it. To post is to raise the
counter, and to wake who sleeps (futex) if somebody does. Going to sleep and being woken takes longer than most waits of quick steps,
so a rank looks for a while before: for as long as its last waits took, and only where every rank has a core of its own. It gives the
core away between looks; a core that comes back late is one that others need, and then it sleeps at once for a while.

Each waiter relies on another core seeing writes in the order in which they were made: so on x86-64, not everywhere on ARM.
"""

from __future__ import annotations

import ctypes
import os
import select
import threading
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
_LOOKS = 20  # without giving the core away: 2 us. 1000 of them cost 4 ranks on 2 cores a quarter more
_FEW = 5  # looks with giving it away, where cores are short
_MAX_SPIN_S = 0.002  # who usually waits longer than this sleeps at once
_MIN_SPIN_S = 0.0002
_LATE_S = 0.0005  # a core given away that is back after more than this was used by another process
_CROWDED_WAITS = 32  # for which nobody looks longer after that
_SLICE_S = 0.02  # asleep between two looks at whether the other lives
_LEFT = 1  # in the word after the counter; the next one says whether somebody sleeps on the counter
_SLEEPS = 2

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
        has_core: Whether every rank has a core of its own, so that looking for the others takes time from nobody.
        names: What these ranks are called in messages, where they are some of the job's.
    """

    def __init__(
        self,
        memory: mmap,
        rank: int,
        process_fds: list[int],
        timeout_s: float,
        *,
        has_core: bool,
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
        self._fence = threading.Lock()
        self.has_core = has_core
        self._usual_s, self._crowded = _MIN_SPIN_S, 0
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
        words, mine = self._words, self._mine
        words[mine] = value & _MASK
        # The counter must be out before the look at who sleeps: taking a lock is an instruction that no store passes.
        self._fence.acquire()
        self._fence.release()
        if words[mine + _SLEEPS]:
            words[mine + _SLEEPS] = 0
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
        self._words[self._mine + _LEFT] = 1
        self._syscall(*self._wake_args)

    def _wait(self, place: int, value: int) -> None:
        words = self._words
        for _ in range(_LOOKS):
            if (words[place] - value) & _MASK < _HALF:
                return
        begun = time.monotonic()
        if not self._look(place, value, begun):
            self._wait_asleep(place, value, begun)
        self._usual_s += 0.1 * (min(time.monotonic() - begun, 10 * _MAX_SPIN_S) - self._usual_s)

    def _look(self, place: int, value: int, begun: float) -> bool:
        """Look for as long as it pays; whether the other has come."""
        words, give_away, now = self._words, os.sched_yield, begun
        spin_s = 0.0
        if self._crowded > 0:
            self._crowded -= 1
        elif self.has_core and self._usual_s < _MAX_SPIN_S:
            spin_s = max(_MIN_SPIN_S, 4 * self._usual_s)
        looks = 0
        while looks < _FEW or now - begun < spin_s:
            give_away()
            if (words[place] - value) & _MASK < _HALF:
                return True
            before, now, looks = now, time.monotonic(), looks + 1
            if now - before > _LATE_S:
                self._crowded = _CROWDED_WAITS
                return False
        return False

    def _wait_asleep(self, place: int, value: int, begun: float) -> None:
        words, deadline, rank = self._words, begun + self.timeout_s, place // self._step
        while True:
            seen = words[place]
            if (seen - value) & _MASK < _HALF:
                return
            gone = words[place + _LEFT] or self._has_ended(rank)
            if gone and (words[place] - value) & _MASK >= _HALF:  # it may have posted, then ended
                raise self._ended(rank)
            if time.monotonic() > deadline:
                raise self._late(value)
            self._sleep(place, seen)

    def _sleep(self, place: int, seen: int) -> None:
        """Until the counter at `place` is no longer `seen`, a signal comes, or a slice of time is over."""
        self._words[place + _SLEEPS] = 1
        # The kernel looks at the counter once more, behind a barrier: who posted before this line was seen is not missed.
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
