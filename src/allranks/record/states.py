"""What do the marks of different modules have to know of each other?"""

from __future__ import annotations

import weakref
from _thread import get_ident
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from allranks.record import compat, process
from allranks.record import layout as at

_writer = process.WRITER
# Threads inside a marked call: what torch calls in turn is not the user's call.
inside: set[int] = set()
# The default process group, to ask for its sequence number; None before init and after destroy.
world: Any = None


class Replica:
    """A DistributedDataParallel whose gradients are checked after its backward."""

    __slots__ = ("_ddp", "alarms")

    def __init__(self, ddp: Any) -> None:
        self._ddp = weakref.ref(ddp)
        self.alarms = 0

    @property
    def ddp(self) -> Any:
        """The module, None when it is gone."""
        return self._ddp()


MAX_ALARMS = 8  # then it is no DDP whose own backward comes next (a GAN's other half)
replica: Replica | None = None  # the one whose forward was last, until its backward
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
    """A forward of `ddp` has returned: one micro-step more, and gradients to come."""
    global replica
    import torch

    if not torch.is_grad_enabled():
        return
    _writer.words[at.W_MICRO_STEP] += 1
    known = _replicas.get(id(ddp))
    if known is None or known.ddp is not ddp:
        known = _replicas[id(ddp)] = Replica(ddp)
    replica = known if known.alarms < MAX_ALARMS and compat.may_check_reducer(ddp) else None


def note_step_end() -> None:
    """At the end of an optimizer step: how many collectives were issued; all ranks must agree on it."""
    if world is not None:
        words = _writer.words
        words[at.W_STEP_SEQ] = words[at.W_GROUP_SEQ] = compat.sequence_number(world)


def communication_failed(error: BaseException, what: str) -> None:
    """A collective, forward or backward raised; without a launcher of ours, say here what is known."""
    if _writer.words[at.W_FLAGS] & at.IN_PROCESS:
        from allranks.record import inprocess

        inprocess.communication_failed(error, what)


def known_replicas() -> list[Any]:
    """The DDP modules that were used and still live."""
    return [ddp for known in list(_replicas.values()) if (ddp := known.ddp) is not None]


process.AFTER_FORK.append(inside.clear)
