"""How does a process write its record, within a fraction of a microsecond a mark?

The words of the page are a memoryview of 64-bit integers over the mapped file: a mark is a clock reading and two stores, no lock, no
system call. Between torch's own calls nothing of ours is in the processor's cache, and all that a mark touches costs ten times what it
costs alone; so in most of quick steps marks are light (light.py) and only count. Only the thread that owns the page (the one that
trains) writes phases; collectives of other threads go to the ring alone. No torch here, and no import that is not cheap: every process
of a job runs it.
"""

from __future__ import annotations

import mmap
import os
import sys
from _operator import add
from _thread import get_ident
from array import array
from sys import _getframe
from time import monotonic_ns, time_ns

from allranks.record import layout as at
from allranks.record.layout import (
    STEP_ENDS,
    W_EPOCH,
    W_MICRO_STEP,
    W_PHASE,
    W_SINCE_NS,
    W_STEP,
    W_STEP_ISSUED,
)
from allranks.record.light import Light, Shares, phase_on
from allranks.record.ring import Ring

TYPE_CHECKING = False  # typing costs 5 ms at the start of every process
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType


LAST_STEP_END = at.NUM_STEP_ENDS - 1


class Writer(Ring):
    """The record of this process: in memory, or in a page once it is told where by `open`."""

    __slots__ = (
        "_backward_before",
        "_before_evaluation",
        "_exchanged_before",
        "_known_end",
        "_shares",
        "_timed",
        "_timed_step",
        "buffers_ns",
        "exchanged_ns",
        "exchanged_of_ns",
        "exchanged_steps",
        "is_library_stepped",
        "is_looked",
        "is_timed",
        "light",
        "line_of",
        "loss",
        "mark",
        "may_be_light",
        "moved_ns",
        "next_looked",
        "next_timed",
        "on_step",
        "owner",
        "path",
        "spent_ns",
        "stack",
        "timed_ns",
        "times",
    )

    def __init__(self) -> None:
        super().__init__()
        self.spent_ns = [0] * at.NUM_PHASES
        self.moved_ns = [0] * at.NUM_PHASES  # to another phase than the mark's: all that an evaluation does
        # The moments of the step that goes on; what a step does not have is of an older one.
        self.times = [0] * at.TIMED_WORDS
        self.stack: list[int] = []
        self.light = Light(memoryview(b""))
        self.line_of: Callable[[FrameType | None], int] = lambda _: 0  # the user's line, for a page's words
        self.on_step: Callable[[int], None] | None = (
            None  # at the end of each step, and of light ones where something is due
        )
        self._start(bytearray(at.PAGE_BYTES), None)

    def open(self, folder: str) -> None:
        """Write into `<pid>.page` of `folder` from now on, from the beginning; also after a fork, in the child.

        Raises:
            OSError: The folder is not there, may not be written, or is full; the record stays where it was.
        """
        path = os.path.join(folder, f"{os.getpid()}{at.SUFFIX}")  # noqa: PTH118 - pathlib costs 5 ms here
        making = (
            path + ".new"
        )  # a reader never sees a half-made page, nor that of an old process with this pid
        descriptor = os.open(making, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            _allocate(descriptor)
            buffer = mmap.mmap(descriptor, at.PAGE_BYTES)
        finally:
            os.close(descriptor)
        self.close()
        self._start(buffer, path)
        os.rename(making, path)  # noqa: PTH104 - as above

    def close(self) -> None:
        """Write into memory of this process only; a page that was open stays as it is."""
        words = self.words
        self._start(bytearray(at.PAGE_BYTES), None)
        words.release()  # its memory goes when nobody has it any more: the tick thread may be looking at it

    def _start(self, buffer: mmap.mmap | bytearray, path: str | None) -> None:
        self.path = path  # None: in memory only
        self.buffer = buffer
        self.words = memoryview(buffer).cast("q")
        self.owner = get_ident()
        self.spent_ns[:] = [0] * at.NUM_PHASES
        self.stack.clear()
        self.light.begin(self.words)
        self.times[:] = [0] * at.TIMED_WORDS
        self.moved_ns[:] = [0] * at.NUM_PHASES
        self._before_evaluation: list[int] | None = None
        self.buffers_ns = self.exchanged_ns = self.exchanged_of_ns = self.exchanged_steps = 0
        self._backward_before = self._exchanged_before = 0
        self.loss: float | None = None
        self.next_timed, self.is_timed = 1, True
        # Whether the step that goes on is looked at; if not, its marks may be light.
        self.next_looked, self.is_looked, self.may_be_light = 1, True, False
        self._known_end = 0
        self._shares = Shares()
        self._timed = self._timed_step = self.timed_ns = 0
        # mark(phase | line << 8), for the owner: what the process does now; gives what it did before, to be given back.
        self.mark = self._make_mark(self.words, self.spent_ns)
        self.is_library_stepped = False
        self._begin_ring()
        self._begin_texts()
        self._fill()

    def _fill(self) -> None:
        w = self.words
        w[at.W_VERSION] = at.VERSION
        w[at.W_PID], w[at.W_PARENT] = os.getpid(), os.getppid()
        w[at.W_START_NS], w[at.W_START_UNIX_NS] = w[at.W_SINCE_NS], time_ns()
        w[at.W_RANK] = w[at.W_LOCAL_RANK] = w[at.W_WORKER_ID] = w[at.W_GROUP_SEQ] = w[at.W_STEP_SEQ] = -1
        w[at.SAMPLE_INDEX], w[at.W_SEEN] = -1, at.PYTHON
        self.text(at.HOST, os.uname().nodename, 8 * at.HOST_WORDS - 8)
        self.text(at.COMMAND, " ".join(getattr(sys, "orig_argv", sys.argv)), 8 * at.COMMAND_WORDS - 8)
        w[at.W_MAGIC] = at.MAGIC  # last: now it is a page

    # -- phases ---------------------------------------------------------------------------------------------

    def _make_mark(self, words: memoryview, spent_ns: list[int]) -> Callable[[int], int]:
        words[W_SINCE_NS] = monotonic_ns()
        light = self.light

        def mark(key: int) -> int:
            now = monotonic_ns()
            if light.is_on:
                self.end_light(now, _getframe(1).f_back)  # what it was before the call that is marked
            before = words[W_PHASE]
            spent_ns[before & 255] += now - words[W_SINCE_NS]
            words[W_PHASE], words[W_SINCE_NS] = key, now
            return before

        return mark

    def phase(self, phase: int, line: int = 0) -> None:
        """The process now does `phase`, until `leave`; `line` is a number from `string`."""
        if get_ident() == self.owner:
            self.stack.append(self.mark(phase | line << 8))
            if phase == at.EVALUATE and self._before_evaluation is None:
                self._before_evaluation = self._spent()

    def leave(self) -> None:
        """The phase that `phase` began is over: back to the one before."""
        if get_ident() == self.owner and self.stack:
            before = self.mark(self.stack.pop())
            if before & 0xFF == at.EVALUATE and self._before_evaluation is not None:
                spent, self._before_evaluation = _within(self._spent(), self._before_evaluation), None
                self.moved_ns[:] = [to - ours for to, ours in zip(spent, self.spent_ns, strict=True)]

    def _spent(self) -> list[int]:
        return [*map(add, self.spent_ns, self.moved_ns)]

    def end_light(self, now: int, frame: FrameType | None = None) -> None:
        """From now on the marks of this step have clocks.

        Args:
            now: Monotonic ns; since then the process does what it does.
            frame: The innermost frame of the thread that trains, in which its marks are looked for.
        """
        light, w = self.light, self.words
        phase, mark = phase_on(frame)
        if phase == at.DATA:
            phase = light.data_key
        elif mark is not None:
            phase |= self.line_of(mark.f_back)
        if not light.is_on:
            return
        # No call from here on: the tick thread, which may end them, too, does not come in between.
        light.is_on = False
        w[at.W_LIGHT] = 0
        spent = now - w[W_SINCE_NS]
        self.spent_ns[at.UNMARKED] += spent if spent > 0 else 0
        w[W_PHASE], w[W_SINCE_NS] = phase, now
        self._fill_ends(now)

    def _fill_ends(self, now: int, halves: int = 1) -> None:
        """The ends of steps with light marks, evenly between the last one that is known and `now`, when half a step more is over."""
        w, step, known = self.words, self.light.step, self._known_end
        if step > known:
            since = w[STEP_ENDS + (known & LAST_STEP_END)]
            length = 2 * (now - since) // (2 * (step - known) + halves)
            for other in range(max(known + 1, step - LAST_STEP_END), step + 1):
                w[STEP_ENDS + (other & LAST_STEP_END)] = since + (other - known) * length
            self._known_end = w[at.STEP_ENDED] = step

    def flush(self) -> None:
        """Put the cumulative times into the page: done by the tick thread, not at every mark."""
        w = self.words
        since, phase, now = w[at.W_SINCE_NS], w[at.W_PHASE] & 0xFF, monotonic_ns()
        ended, before, loss = self._spent(), self._before_evaluation, self.loss
        spent = list(ended)
        spent[at.UNMARKED if self.light.is_on else phase] += max(0, now - since)
        if before is not None:
            spent = _within(spent, before)
        guessed = self._shares.share_out(spent[at.UNMARKED])
        ended, spent = [*map(add, ended, guessed)], [*map(add, spent, guessed)]
        ended[at.UNMARKED] = spent[at.UNMARKED] = 0
        for word, ns in enumerate(ended, at.CUM_NS):
            w[word] = ns
        # Not a complex one.
        millionths = int(loss * 1e6) if type(loss) is float and -1e12 < loss < 1e12 else None
        exchanged = self.buffers_ns, self.exchanged_ns, self.exchanged_of_ns
        row = now, self.step, *exchanged, millionths is not None, millionths or 0, 0, *spent, 0, 0, 0, now
        self.buffer[8 * at.TIMES : 8 * (at.TIMES + at.TIMES_WORDS)] = array("q", row)  # at once

    # -- steps ----------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Optimizer steps that have ended."""
        return self.light.step

    def set_step(self, step: int, micro_step: int = 0, epoch: int | None = None) -> None:
        """The library says that `step` optimizer steps have ended; the optimizer hooks no longer count."""
        light, w = self.light, self.words
        if light.is_on and step == light.step + 1 and not micro_step and epoch in (None, w[W_EPOCH]):
            light.step = light.step_words[0] = step
            light.micro_steps = light.step_words[1] = 0
            if step >= light.until and self.on_step is not None:
                self.on_step(step)
            return
        self.end_light(monotonic_ns())
        if not self.is_library_stepped:
            self.is_library_stepped, light.is_hook_counted = True, False
            w[at.W_FLAGS] |= at.LIBRARY_STEPS
        if epoch is not None:
            w[W_EPOCH] = epoch
        light.micro_steps = w[W_MICRO_STEP] = micro_step
        if step != light.step:
            if step < light.step:  # another run in this process, or back to a checkpoint
                self.next_looked = self.next_timed = step + 1
                self._timed_step = 0
            light.step = step - 1
            self.end_step()
            if self.on_step is not None:
                self.on_step(step)

    def end_step(self, now: int = 0) -> int:
        """One more optimizer step has ended, at `now` if that is known, with whole marks; gives their number."""
        light, w = self.light, self.words
        light.step = step = light.step + 1
        self._known_end = w[at.STEP_ENDED] = step
        w[STEP_ENDS + (step & LAST_STEP_END)] = now = now or monotonic_ns()
        self.spent_ns[w[W_PHASE] & 0xFF] += max(0, now - w[W_SINCE_NS])
        w[W_SINCE_NS] = now
        if step >= self.next_looked:
            if step >= self.next_timed:
                self._keep_times(step, now)
            self._shares.ended(self.spent_ns)
            self.next_looked = step + 1
            if self.may_be_light:
                self.next_looked = self.next_timed
        self._choose_marks(step)
        light.micro_steps = w[W_MICRO_STEP] = 0
        w[W_STEP_ISSUED] = self.issued
        w[W_STEP] = step
        return step

    def end_light_step(self) -> None:
        """A step with light marks has ended, and been counted; the next one may be looked at."""
        light, w = self.light, self.words
        if light.step + 1 >= self.next_looked:
            now = monotonic_ns()
            self._fill_ends(now, 0)
            self.end_light(now)
            w[W_STEP_ISSUED] = self.issued
            self._choose_marks(light.step, was_light=True)

    def look_soon(self) -> None:
        """Steps are not as quick as they were: the next but one is looked at, and not only when the next of the quick ones was due."""
        self.next_looked = self.next_timed = min(self.next_timed, self.light.step + 2)

    def _choose_marks(self, step: int, *, was_light: bool = False) -> None:
        """Of the step after `step`."""
        w = self.words
        self.is_timed = step + 1 >= self.next_timed
        self.is_looked = step + 1 >= self.next_looked
        if self.is_looked:
            self._shares.begins(self.spent_ns, was_light=was_light)
            if self.is_timed:  # all of its backward will be wanted
                self._backward_before = self.spent_ns[at.BACKWARD]
        elif (
            w[W_PHASE] & 0xFF == at.PYTHON
            and self._before_evaluation is None
            and get_ident() == self.owner
            and self._shares.may_be_light(step)
        ):
            w[at.W_LIGHT] = 1
            self.light.is_on = True

    def _keep_times(self, step: int, now: int) -> None:
        """The moments of this step go into the page; about ten steps a second are timed.

        By preference: where ranks do not agree how quick their steps are, every step that one of them times the others time, too.
        """
        w, times = self.words, self.times
        before = w[at.STEP_ENDS + (step - 1) % at.NUM_STEP_ENDS] if step > 1 else 0
        since = before or w[at.W_START_NS]
        base = at.TIMED + self._timed % at.NUM_TIMED * at.TIMED_WORDS
        # The number of the step, which is first and last, is 0 meanwhile.
        for word, ns in enumerate(times, base):
            w[word] = ns if ns >= since else 0
        w[base + at.M_START] = before or min((ns for ns in times if ns >= since), default=now)
        w[base + at.M_END] = now
        w[base + at.M_TAIL] = w[base + at.M_STEP] = step
        self._timed += 1
        if self.exchanged_steps != self._exchanged_before:
            self._exchanged_before = self.exchanged_steps
            self.exchanged_of_ns += self.spent_ns[at.BACKWARD] - self._backward_before
        length = at.TIMED_EVERY_NS
        if self._timed_step:
            length = (now - self.timed_ns) // max(1, step - self._timed_step)
        self._timed_step, self.timed_ns = step, now
        self.next_timed = at.next_timed(step, length)

    def collective(self, op: str, *, line: int = 0) -> _Inside:
        """A context: this process is inside a collective that torch's own marks do not see."""
        return _Inside(self, op, line)

    # -- the end ---------------------------------------------------------------------------------------------

    def exited(self, kind: int, code: int = 0, line: int = 0) -> None:
        """How the process goes; the first word counts, but ENDED gives way to a better one."""
        w = self.words
        if w[at.W_EXIT_KIND] in (at.NOT_ENDED, at.ENDED):
            w[at.W_EXIT_CODE], w[at.W_EXIT_LINE], w[at.W_EXIT_NS] = code, line, monotonic_ns()
            w[at.W_EXIT_KIND] = kind


def _within(spent: list[int], before: list[int]) -> list[int]:
    """Times as if all since `before` had been evaluation."""
    found = list(before)
    found[at.EVALUATE] += sum(spent) - sum(before)
    return found


def _allocate(descriptor: int) -> None:
    # A full /dev/shm is an error now, not a bus error at the first write.
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, at.PAGE_BYTES)
    else:  # macOS
        os.write(descriptor, bytes(at.PAGE_BYTES))


class _Inside:
    __slots__ = ("line", "op", "slot", "writer")

    def __init__(self, writer: Writer, op: str, line: int) -> None:
        self.writer, self.op, self.line = writer, op, line

    def __enter__(self) -> None:
        self.slot = self.writer.enter_collective(self.writer.string(self.op), line=self.line)
        self.writer.phase(at.COLLECTIVE, self.line)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.writer.leave()
        self.writer.exit_collective(self.slot, at.FAILED if kind else 0)
