"""How does a process write its record, within a fraction of a microsecond a mark?

The words of the page are a memoryview of 64-bit integers over the mapped file: a mark is a clock reading and two stores, no lock, no
system call. Between torch's own calls nothing of ours is in the processor's cache, and a Python call costs ten times what it costs
alone; so in most of quick steps marks are light (light.py) and make none. Only the thread that
owns the page (the one that trains) writes phases; collectives of other threads go to the ring alone. No torch here, and no import
that is not cheap: every process of a job runs it.
"""

from __future__ import annotations

import mmap
import os
import sys
from _thread import get_ident
from array import array
from itertools import count
from time import monotonic_ns, time_ns

from allranks.record import layout as at
from allranks.record.layout import STEP_ENDS, W_MICRO_STEP, W_PHASE, W_SINCE_NS, W_STEP, W_STEP_ISSUED
from allranks.record.light import Shares
from allranks.record.texts import Texts

TYPE_CHECKING = False  # typing costs 5 ms at the start of every process
if TYPE_CHECKING:
    from collections.abc import Callable


LAST_STEP_END = at.NUM_STEP_ENDS - 1


class Writer(Texts):
    """The record of this process: in memory, or in a page once it is told where by `open`."""

    __slots__ = (
        "_backward_before",
        "_before_evaluation",
        "_exchanged_before",
        "_looked_least",
        "_shares",
        "_slots",
        "_timed",
        "_timed_ns",
        "_timed_step",
        "buffers_ns",
        "exchanged_ns",
        "exchanged_of_ns",
        "exchanged_steps",
        "is_library_stepped",
        "is_looked",
        "is_timed",
        "issued",
        "light",
        "loss",
        "mark",
        "may_be_light",
        "moved_ns",
        "next_looked",
        "next_timed",
        "owner",
        "path",
        "spent_ns",
        "stack",
        "step",
        "times",
    )

    def __init__(self) -> None:
        super().__init__()
        self.spent_ns = [0] * at.NUM_PHASES
        self.moved_ns = [0] * at.NUM_PHASES  # to another phase than the mark's: all that an evaluation does
        # The moments of the step that goes on; what a step does not have is of an older one.
        self.times = [0] * at.TIMED_WORDS
        self.stack: list[int] = []
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
        old, words = self.buffer, self.words
        self._start(bytearray(at.PAGE_BYTES), None)
        words.release()
        if isinstance(old, mmap.mmap):
            old.close()

    def _start(self, buffer: mmap.mmap | bytearray, path: str | None) -> None:
        self.path = path  # None: in memory only
        self.buffer = buffer
        self.words = memoryview(buffer).cast("q")
        self.owner = get_ident()
        self.spent_ns[:] = [0] * at.NUM_PHASES
        self.stack.clear()
        self.step = self.issued = 0
        self.times[:] = [0] * at.TIMED_WORDS
        self.moved_ns[:] = [0] * at.NUM_PHASES
        self._before_evaluation: list[int] | None = None
        self.buffers_ns = self.exchanged_ns = self.exchanged_of_ns = self.exchanged_steps = 0
        self._backward_before = self._exchanged_before = 0
        self.loss: float | None = None
        self.next_timed, self.is_timed = 1, True
        # Whether the step that goes on is looked at; if not, `light` is the words for its marks to write to, without a clock (light.py).
        self.next_looked, self.is_looked, self.may_be_light = 1, True, False
        self._looked_least = 0
        self.light: memoryview | None = None
        self._shares = Shares()
        self._timed = self._timed_step = self._timed_ns = 0
        # mark(phase | line << 8), for the owner: what the process does now; gives what it did before, to be given back.
        self.mark = self._make_mark(self.words, self.spent_ns)
        self.is_library_stepped = False
        self._slots = count(1)
        self._begin_texts()
        self._fill()

    def _fill(self) -> None:
        w = self.words
        w[at.W_VERSION] = at.VERSION
        w[at.W_PID], w[at.W_PARENT] = os.getpid(), os.getppid()
        w[at.W_START_NS], w[at.W_START_UNIX_NS] = w[at.W_SINCE_NS], time_ns()
        w[at.W_RANK] = w[at.W_LOCAL_RANK] = w[at.W_WORKER_ID] = w[at.W_GROUP_SEQ] = w[at.W_STEP_SEQ] = -1
        w[at.SAMPLE_INDEX] = -1
        self.text(at.HOST, os.uname().nodename, 8 * at.HOST_WORDS - 8)
        self.text(at.COMMAND, " ".join(getattr(sys, "orig_argv", sys.argv)), 8 * at.COMMAND_WORDS - 8)
        w[at.W_MAGIC] = at.MAGIC  # last: now it is a page

    # -- phases ---------------------------------------------------------------------------------------------

    def _make_mark(self, words: memoryview, spent_ns: list[int]) -> Callable[[int], int]:
        words[W_SINCE_NS] = monotonic_ns()

        def mark(key: int) -> int:
            now = monotonic_ns()
            if self.light is not None:
                self.end_light(now)
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
        return [spent + moved for spent, moved in zip(self.spent_ns, self.moved_ns, strict=True)]

    def end_light(self, now: int) -> None:
        """From now on the marks of this step have clocks."""
        if self.light is not None:
            self.light = None
            w = self.words
            self.spent_ns[at.UNMARKED] += max(0, now - w[W_SINCE_NS])
            w[W_SINCE_NS] = now

    def flush(self) -> None:
        """Put the cumulative times into the page: done ten times a second, not at every mark."""
        w = self.words
        since, phase, now = w[at.W_SINCE_NS], w[at.W_PHASE] & 0xFF, monotonic_ns()
        ended, before = self._spent(), self._before_evaluation
        spent = list(ended)
        spent[at.UNMARKED if self.light is not None else phase] += max(0, now - since)
        if before is not None:
            spent = _within(spent, before)
        guessed = self._shares.share_out(spent[at.UNMARKED])
        for times in (ended, spent):
            times[:] = [known + more for known, more in zip(times, guessed, strict=True)]
            times[at.UNMARKED] = 0
        w[at.CUM_NS : at.CUM_NS + at.NUM_PHASES] = memoryview(array("q", ended))
        loss = self.loss
        has_loss = loss is not None and -1e12 < loss < 1e12
        row = array("q", (now, self.step, self.buffers_ns, self.exchanged_ns, self.exchanged_of_ns, has_loss))
        row.extend((int(loss * 1e6) if has_loss and loss is not None else 0, 0, *spent, 0, 0, 0, now))
        w[at.TIMES : at.TIMES + at.TIMES_WORDS] = memoryview(row)

    # -- steps ----------------------------------------------------------------------------------------------

    def set_step(self, step: int, micro_step: int = 0, epoch: int | None = None) -> None:
        """The library says that `step` optimizer steps have ended; the optimizer hooks no longer count."""
        w = self.words
        if not self.is_library_stepped:
            self.is_library_stepped = True
            self.may_be_light = False  # the hooks that say whether steps are quick no longer do
            w[at.W_FLAGS] |= at.LIBRARY_STEPS
        if epoch is not None:
            w[at.W_EPOCH] = epoch
        w[at.W_MICRO_STEP] = micro_step
        if step != self.step:
            if step < self.step:  # another run in this process, or back to a checkpoint
                self.next_looked = self.next_timed = step + 1
                self._timed_step = 0
            self.step = step - 1
            self.end_step()

    def end_step(self, now: int = 0) -> int:
        """One more optimizer step has ended, at `now` if that is known; gives their number."""
        w = self.words
        self.step = step = self.step + 1
        w[STEP_ENDS + (step & LAST_STEP_END)] = now = now or monotonic_ns()
        if step + 1 >= self.next_looked or self.light is None:
            self._look(step, now)
        w[W_MICRO_STEP] = 0
        w[W_STEP_ISSUED] = self.issued
        w[W_STEP] = step
        return step

    def _look(self, step: int, now: int) -> None:
        """A step that was looked at has ended, or one that will be begins, or something has ended the light marks of a step."""
        w = self.words
        if self.light is None:
            self.spent_ns[w[W_PHASE] & 0xFF] += max(0, now - w[W_SINCE_NS])
            w[W_SINCE_NS] = now
        if step >= self.next_looked:
            if step >= self.next_timed:
                self._keep_times(step, now)
            self._shares.ended(self.spent_ns)
            self.next_looked = step + 1
            if self.may_be_light:
                self.next_looked = min(self.next_timed, at.next_preferred(step, self._looked_least))
        self.is_timed = step + 1 >= self.next_timed
        self.is_looked = step + 1 >= self.next_looked
        if not self.is_looked:
            if (
                w[W_PHASE] & 0xFF == at.PYTHON
                and self._before_evaluation is None
                and get_ident() == self.owner
                and self._shares.may_be_light()
            ):
                self.light = w
            return
        was_light = self.light is not None
        self.end_light(now)
        self._shares.begins(self.spent_ns, was_light=was_light)
        if self.is_timed:  # all of its backward will be wanted
            self._backward_before = self.spent_ns[at.BACKWARD]

    def _keep_times(self, step: int, now: int) -> None:
        """The moments of this step go into the page; about ten steps a second are timed.

        By preference: where ranks do not agree how quick their steps are, every step that one of them times the others time, too.
        """
        w, times = self.words, self.times
        before = w[at.STEP_ENDS + (step - 1) % at.NUM_STEP_ENDS] if step > 1 else 0
        since = before or w[at.W_START_NS]
        times = [t if t >= since else 0 for t in times]
        times[at.M_START] = before or min((t for t in times if t), default=now)
        times[at.M_END] = now
        times[at.M_STEP] = times[at.M_TAIL] = step
        base = at.TIMED + self._timed % at.NUM_TIMED * at.TIMED_WORDS
        w[base + at.M_STEP] = w[base + at.M_TAIL] = 0
        w[base : base + at.TIMED_WORDS] = memoryview(array("q", times))
        self._timed += 1
        if self.exchanged_steps != self._exchanged_before:
            self._exchanged_before = self.exchanged_steps
            self.exchanged_of_ns += self.spent_ns[at.BACKWARD] - self._backward_before
        length = (
            (now - self._timed_ns) // max(1, step - self._timed_step)
            if self._timed_step
            else at.TIMED_EVERY_NS
        )
        self._timed_step, self._timed_ns = step, now
        self.next_timed = at.next_timed(step, length)
        self._looked_least = at.least_preference(length, at.LOOKED_EVERY_NS)

    # -- collectives ----------------------------------------------------------------------------------------

    def enter_collective(
        self,
        op: int,
        group: int = 0,
        *,
        ranks: int = 0,
        seq: int = -1,
        reduce_op: int = 0,
        root: int = -1,
        dtype: int = 0,
        shape: tuple[int, ...] = (),
        numel: int = 0,
        num_tensors: int = 0,
        line: int = 0,
        thread: int = 0,
        flags: int = 0,
        is_counted: bool = True,
    ) -> int:
        """A call enters a collective; names are numbers from `string`. Returns the slot for its exit."""
        w = self.words
        number = next(self._slots)
        base = at.RING + number % at.NUM_SLOTS * at.SLOT_WORDS
        w[base + at.S_HEAD] = w[base + at.S_TAIL] = 0
        w[base + at.S_GROUP], w[base + at.S_OP], w[base + at.S_REDUCE] = group, op, reduce_op
        w[base + at.S_ROOT], w[base + at.S_DTYPE], w[base + at.S_NUMEL] = root, dtype, numel
        dims = base + at.S_DIMS
        w[base + at.S_NDIM] = len(shape)
        for dim in shape[: at.NUM_DIMS]:
            w[dims] = dim
            dims += 1
        w[base + at.S_LINE], w[base + at.S_THREAD], w[base + at.S_SEQ] = line, thread, seq
        w[base + at.S_RANKS], w[base + at.S_TENSORS], w[base + at.S_STEP] = ranks, num_tensors, w[at.W_STEP]
        w[base + at.S_FLAGS], w[base + at.S_EXITED] = flags, 0
        w[base + at.S_ENTERED] = monotonic_ns()
        w[base + at.S_TAIL] = number
        w[base + at.S_HEAD] = number
        if is_counted:  # sends, receives and waits are not what all ranks must have done equally often
            w[at.W_ISSUED] = self.issued = self.issued + 1
        return base

    def exit_collective(self, slot: int, flags: int = 0) -> None:
        """The call of `slot` came back."""
        w = self.words
        if flags:
            w[slot + at.S_FLAGS] |= flags
        w[slot + at.S_EXITED] = monotonic_ns()

    def collective(self, op: str, *, line: int = 0) -> _Inside:
        """A context: this process is inside a collective that torch's own marks do not see."""
        return _Inside(self, op, line)

    # -- the end ---------------------------------------------------------------------------------------------

    def last_words(self, place: int, kind: str, message: str, line: str, thread: str = "") -> None:
        """The exception that ends the script (`layout.EXCEPTION`) or a thread (`layout.THREAD_EXCEPTION`)."""
        room = 8 * at.LAST_WORDS_WORDS - 16
        kind, thread = kind[:100], thread[:60]
        fixed = len(f"{kind}{line}{thread}".encode("utf-8", "replace")) + 3
        raw = message.replace("\0", " ").encode("utf-8", "replace")[: max(0, room - fixed)]
        message = raw.decode("utf-8", "ignore")
        self.text(place + 1, f"{kind}\0{message}\0{line}\0{thread}", room)
        self.words[place] = monotonic_ns()

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
