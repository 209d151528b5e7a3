"""What do the marks of different modules have to know of each other?"""

from __future__ import annotations

import weakref
from _thread import get_ident
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic_ns
from typing import Any

from allranks.record import compat, process, thrown
from allranks.record import layout as at
from allranks.record.counts import IS_COMPILED, QUICK_STEP_NS

_writer = process.WRITER
# Threads inside a marked call: what torch calls in turn is not the user's call.
inside: set[int] = set()
# The default process group, to ask for its sequence number; None before init and after destroy.
world: Any = None


# The steps of a power of two, not over the most, at whose multiples quick ranks ask whether they still are: so far apart.
_ASKED_EVERY_NS, _LEAST_STEPS, _MOST_STEPS = 100_000_000, 16, 64
_NOTED_OF_ASKED = 4
"""Where it is compiled to ask (_quick.c), how many collectives were issued is noted with one of so many: a call into torch costs 5 us
where its code is not in the processor's cache."""
NEVER = 1 << 62
next_note_step = 0
MAX_ALARMS = 8  # then it is no DDP whose own backward comes next (a GAN's other half)
replicas: dict[int, Replica] = {}


class Replica:
    """A DistributedDataParallel whose gradients are checked after its backward."""

    __slots__ = (
        "alarms",
        "check",
        "check_at_step",
        "ddp",
        "has_unused",
        "is_autocast",
        "is_uncovered",
        "ready_ns",
        "stats",
        "syncs",
    )

    def __init__(self, ddp: Any) -> None:
        key = id(ddp)
        self.ddp = weakref.ref(ddp, lambda _: _forget(key))
        self.check, self.stats = compat.reducer_check(ddp), compat.backward_stats(ddp)
        self.check_at_step = 0 if self.check is not None else NEVER
        self.alarms = 0
        self.has_unused = False
        self.is_autocast = self.is_uncovered = False
        self.syncs = 0  # of the forwards that were looked at, those whose backward averages the gradients; 0 only if none ever did
        self.ready_ns = 0  # of the backward that was timed last: from the end of forward to the last gradient
        replicas[key] = self


def _forget(key: int) -> None:
    replicas.pop(key, None)
    _writer.light.model = 0  # another may get its id


is_synchronised = True  # the last forward of a DDP was not under no_sync
on_failure: Callable[[BaseException, str], None] | None = None  # of inprocess.py
pending: Replica | None = None  # the one whose forward was last, until its backward


def expect_gradients(replica: Replica, ddp: Any) -> None:
    """After the next backward, look whether and when all gradients of `ddp` have come."""
    global pending
    if ddp.require_backward_grad_sync:  # else DDP collects them, and the last micro-step counts
        pending = replica
        if not (count := _writer.exchanged_steps + 1) & (count - 1):  # replicas.look notes it of these
            replica.is_autocast = compat.is_autocast_on()


is_quick = False  # and then only some steps are looked at: writer.is_looked
wants_all = False  # something wants each step looked at
noted = (0, 0)  # step, ns
length_ns = 0  # of a step, when that was noted last


def is_note_due(step: int) -> bool:
    """At the end of a step, whether `note_step_end` is to be called. Asks if steps are still quick, where no light mark does (_quick.c)."""
    light = _writer.light
    if not light.ask_at or not noted[0] <= step < next_note_step:  # not quick, or counted anew
        return True
    if step >= light.ask_at:
        now = monotonic_ns()
        if now - light.asked_ns >= (step - light.asked_step) * QUICK_STEP_NS:
            return True
        light.asked_ns, light.asked_step, light.ask_at = now, step, step + light.ask_every
    return False


def note_step_end() -> bool:
    """How many collectives were issued when a step ended; all ranks must agree on it. Gives whether steps were quick, and are not now."""
    global next_note_step, noted, is_quick, length_ns
    words, step, now = _writer.words, _writer.step, monotonic_ns()
    if world is not None:
        words[at.W_SEQ_STEP] = -1
        words[at.W_STEP_SEQ] = compat.sequence_number(world)
        words[at.W_SEQ_STEP] = step
    light, before, at_ns = _writer.light, *noted
    if before < light.asked_step < step:
        before, at_ns = light.asked_step, light.asked_ns
    length = length_ns = (now - at_ns) // max(1, step - before)
    was_quick, is_quick = is_quick, length < QUICK_STEP_NS
    noted = step, now
    _writer.may_be_light = is_quick and not wants_all
    period = _LEAST_STEPS if is_quick else 1
    while is_quick and period < _MOST_STEPS and 2 * period * length <= _ASKED_EVERY_NS:
        period *= 2
    if not is_quick and _writer.next_looked > step + 2:
        # The record's thread would not end them: from now on it is asked at each step, so it was never long ago.
        _writer.end_light(now)
        _writer.look_soon()
    light.asked_step, light.asked_ns, light.ask_every = step, now, period
    light.ask_at = (step // period + 1) * period
    next_note_step = light.ask_at
    if is_quick and IS_COMPILED and light.is_hook_counted:
        period *= _NOTED_OF_ASKED
        next_note_step = (step // period + 1) * period
    return was_quick and not is_quick


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


def raised(error: BaseException, what: str) -> None:
    """A collective, forward or backward raised; without a launcher of ours, `on_failure` says here what is known."""
    thrown.note(error, what)
    if on_failure is not None:
        on_failure(error, what)


def known_replicas() -> list[Any]:
    """The DDP modules that were used and still live."""
    return [ddp for known in list(replicas.values()) if (ddp := known.ddp()) is not None]


process.AFTER_FORK.append(inside.clear)
