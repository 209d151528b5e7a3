"""What do the marks of different modules have to know of each other?"""

from __future__ import annotations

import weakref
from _thread import get_ident
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic_ns
from typing import Any

from allranks.record import compat, process
from allranks.record import layout as at

_writer = process.WRITER
# Threads inside a marked call: what torch calls in turn is not the user's call.
inside: set[int] = set()
# The default process group, to ask for its sequence number; None before init and after destroy.
world: Any = None


# A call into torch costs 5 us where its code is not in the processor's cache: not at every step of 1 ms.
EVERY_NS = 10_000_000
NEVER_NS = 1 << 62
_next_note_ns = 0
MAX_ALARMS = 8  # then it is no DDP whose own backward comes next (a GAN's other half)


class Replica:
    """A DistributedDataParallel whose gradients are checked after its backward."""

    __slots__ = ("alarms", "check", "check_after_ns", "ddp", "has_unused")

    def __init__(self, ddp: Any) -> None:
        key = id(ddp)
        self.ddp = weakref.ref(ddp, lambda _: _replicas.pop(key, None))
        self.check = compat.reducer_check(ddp)
        self.check_after_ns = 0 if self.check is not None else NEVER_NS
        self.alarms = 0
        self.has_unused = False


pending: Replica | None = None  # the one whose forward was last, until its backward
_replicas: dict[int, Replica] = {}


def is_other_thread() -> bool:
    """Whether this is not the thread that trains, or one already inside a marked call."""
    thread = get_ident()
    return thread != _writer.owner or thread in inside


@contextmanager
def inside_call() -> Iterator[None]:
    """What is called in here is not marked."""
    thread = get_ident()
    inside.add(thread)
    try:
        yield
    finally:
        inside.discard(thread)


def forward_done(ddp: Any) -> None:
    """A forward of `ddp` has returned, with gradients to come: one micro-step more."""
    global pending
    _writer.words[at.W_MICRO_STEP] += 1
    replica = _replicas.get(id(ddp))
    if replica is None:
        replica = _replicas[id(ddp)] = Replica(ddp)
    now = monotonic_ns()
    pending = replica if now >= replica.check_after_ns and ddp.require_backward_grad_sync else None
    if pending is not None:
        replica.check_after_ns = now + EVERY_NS


def note_step_end(now: int) -> None:
    """How many collectives were issued when a step ended; all ranks must agree on it."""
    global _next_note_ns
    if world is None or (_writer.step % 16 and now < _next_note_ns):
        return
    _next_note_ns = now + EVERY_NS
    words = _writer.words
    words[at.W_SEQ_STEP] = -1
    words[at.W_STEP_SEQ] = compat.sequence_number(world)
    words[at.W_SEQ_STEP] = _writer.step


def communication_failed(error: BaseException, what: str) -> None:
    """A collective, forward or backward raised; without a launcher of ours, say here what is known."""
    if _writer.words[at.W_FLAGS] & at.IN_PROCESS:
        from allranks.record import inprocess

        inprocess.communication_failed(error, what)


def known_replicas() -> list[Any]:
    """The DDP modules that were used and still live."""
    return [ddp for known in list(_replicas.values()) if (ddp := known.ddp()) is not None]


process.AFTER_FORK.append(inside.clear)
