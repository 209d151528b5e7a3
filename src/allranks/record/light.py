"""What is left of the marks in a quick step, and where did its time go?

Between torch's own calls a mark with two clocks and its looks costs some 8 us, and a step has five of them: 1 % of a step is gone
where steps take a millisecond or two. So of quick steps only one in 100 to 200 ms has whole marks (`Writer.is_looked`); those of the
others are light (`Light`): they count steps, forwards and batches, in the page, too, and that is all; compiled (counts.py) they do so
without any Python. What such a process does is on its stack, where the marks or what they mark stand (`stands_for`): whatever lasts (a
checkpoint, a collective of the script's own, an evaluation) ends the light marks of its step and is counted exactly, and so does the
tick thread where a step does not come to its end between two of its ticks.

The time of light marks is known as a sum (`layout.UNMARKED`), and shared out here among the phases of a step as in the steps that are
looked at. Which ones these are has no period (`layout.preference`), since much in a loop has one.
"""

from __future__ import annotations

from _weakref import ref

from allranks.record import layout as at
from allranks.record.counts import Counts

TYPE_CHECKING = False  # as in writer.py
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType, FrameType

STALE_NS = 400_000_000
"""No longer is it since the last clock, or since steps were found quick, however many there are until one is looked at."""
FIRST, END = at.PYTHON, at.OPTIMIZER + 1
"""What a step is made of: the phases that have light marks."""
FORGET_NS = 25_000_000
"""After so much time looked at, what was before counts half."""
_UNUSUAL = 8
MOST_WHOLE = 63
"""So many steps at the most have whole marks after one whose light marks were ended."""
_SOON = 8
"""Light marks that last so many steps were not ended by what each step does: the end of a pass, perhaps."""


class Light(Counts):
    """What light marks count: all of it in one object, since what costs is memory that is not in the cache.

    Attributes:
        is_on: The marks of the step that goes on are light.
        step: Optimizer steps that have ended; the page has it after each.
        micro_steps: Forwards since then whose gradients are to come.
        syncs: Forwards so far whose backward averages gradients.
        drawn: Batches of the current pass over a loader.
        until: The step at whose end something is due.
        until_syncs: So many `syncs` at which replicas are compared.
        asked_step: The step at whose end it was asked last whether steps are quick.
        asked_ns: When that was, monotonic.
        ask_every: Where that is compiled, it is asked again after so many steps; what is due besides (`until`) may be later.
        ask_at: The step at whose end it will be; 0: they were not.
        model: id of the replica that was called last.
        iterator: id of the iterator of the current pass.
        optimizer: id of the one whose step ended last.
        optimizers: By id, whether an optimizer's steps are counted; not where another one steps it.
        is_hook_counted: The hooks of optimizers count steps, and not the library.
        data_key: What `layout.W_PHASE` is while a batch of the current pass is drawn.
        step_words: The words of the page that have the step and the micro-steps.
        drawn_word: The one that has the batches.
    """

    __slots__ = ("_references",)

    def __init__(self, words: memoryview) -> None:
        self.begin(words)

    def begin(self, words: memoryview) -> None:
        """A new page."""
        self.step_words = words[at.W_STEP : at.W_MICRO_STEP + 1]
        self.drawn_word = words[at.LOADER + at.L_DRAWN : at.LOADER + at.L_DRAWN + 1]
        self.is_on, self.is_hook_counted = False, True
        self.step = self.micro_steps = self.syncs = self.drawn = 0
        self.asked_step = self.asked_ns = self.ask_every = self.ask_at = 0
        self.until = self.until_syncs = self.model = self.iterator = self.optimizer = 0
        self.optimizers = {}
        self._references: dict[int, object] = {}
        self.data_key = at.DATA

    def know(self, optimizer: object, *, is_counted: bool) -> None:
        """Whether the steps of an optimizer are counted; forgotten with it, since another may get its id."""
        key = id(optimizer)
        if key not in self.optimizers:
            try:
                self._references[key] = ref(optimizer, lambda _: self._forget(key))
            except TypeError:  # one of the user's own
                self._references.pop(key, None)
        self.optimizers[key] = is_counted

    def _forget(self, key: int) -> None:
        self._references.pop(key, None)
        self.optimizers.pop(key, None)
        if self.optimizer == key:
            self.optimizer = 0


_codes: dict[int, tuple[CodeType, int]] = {}
"""By id of the code (to hash one takes long): what a process does while a call of it is on the stack."""


def stands_for(phase: int, mark: Callable[..., object], marked: object = None) -> None:
    """While `mark` is on the stack, or what it marks (a compiled mark has no frame), the process does `phase`."""
    while (inner := getattr(marked, "__wrapped__", None)) is not None:
        marked = inner  # what a decorator puts around a function has the code of all that it decorates
    for function in (mark, marked):
        code = getattr(function, "__code__", None)
        if code is not None:
            _codes[id(code)] = code, phase


def phase_on(frame: FrameType | None) -> tuple[int, FrameType | None]:
    """What the thread does whose innermost frame this is, and the mark's frame; the user's code if none is on its stack."""
    while frame is not None:
        if (found := _codes.get(id(frame.f_code))) is not None:
            return found[1], frame
        frame = frame.f_back
    return at.PYTHON, None


def is_within(frame: FrameType | None, phase: int) -> bool:
    """Whether one of the marks on the stack of this frame stands for `phase`."""
    while frame is not None:
        found, frame = phase_on(frame)
        if frame is not None:
            if found == phase:
                return True
            frame = frame.f_back
    return False


class Shares:
    """How the time of steps without clocks is shared out; of one writer."""

    __slots__ = (
        "_before", "_began", "_is_light", "_left", "_looked", "_mean_ns", "_shared_ns", "_whole", "guessed_ns",
    )  # fmt: skip

    def __init__(self) -> None:
        self.guessed_ns = [0] * at.NUM_PHASES
        self._looked = [0] * (END - FIRST)
        self._before: list[int] = []
        self._mean_ns = self._shared_ns = self._whole = self._left = self._began = 0
        self._is_light = False

    def may_be_light(self, step: int) -> bool:
        """Whether the step after `step` may have light marks.

        Whole steps are shared out. Where something (a collective between backward and optimizer, say) ends the light marks of each,
        what was before would be shared out among what comes after, too: so they are tried less and less often.
        """
        if self._is_light:  # and something ended them
            self._whole = 0 if step - self._began > _SOON else min(2 * self._whole + 1, MOST_WHOLE)
            self._left = self._whole
        elif self._left:
            self._left -= 1
        self._is_light = not self._left
        self._began = step
        return self._is_light

    def begins(self, spent_ns: list[int], *, was_light: bool = False) -> None:
        """A step that is looked at begins; whether the marks were light up to now."""
        if was_light:
            self._whole, self._is_light = 0, False
        self._before = spent_ns[FIRST:END]

    def ended(self, spent_ns: list[int]) -> None:
        """It has ended. One that took many times as long as the others says nothing of them."""
        if not self._before:
            return
        looked, length = list(self._looked), 0
        for place, before in enumerate(self._before):
            ns = spent_ns[FIRST + place] - before
            looked[place] += ns
            length += ns
        if self._mean_ns and length > _UNUSUAL * self._mean_ns:
            length = _UNUSUAL * self._mean_ns  # it counts for the mean, so that steps may become longer
        else:
            self._looked = looked if sum(looked) <= FORGET_NS else [ns // 2 for ns in looked]
        self._mean_ns = (7 * self._mean_ns + length) // 8 if self._mean_ns else length

    def share_out(self, unmarked_ns: int) -> list[int]:
        """What has been shared out so far, by phase, given all that was unmarked so far; never less than before."""
        fresh = unmarked_ns - self._shared_ns
        if fresh > 0:
            self._shared_ns = unmarked_ns
            whole, left = sum(self._looked), fresh
            for phase, ns in enumerate(self._looked, FIRST):
                part = fresh * ns // whole if whole else 0
                self.guessed_ns[phase] += part
                left -= part
            self.guessed_ns[at.PYTHON] += left
        return self.guessed_ns
