"""Where did the time of steps go whose marks took no clock? It is shared out as the steps around them spent theirs.

Between torch's own calls a mark with two clocks and its looks costs some 8 us, and a step has five of them: 1 % of a step is gone
where steps take a millisecond or two. So of quick steps only one in 20 ms has whole marks (`Writer.is_looked`); those of the others are
light: they say what the process does, and no more. Their time is known as a sum (`layout.UNMARKED`), and shared out here among the
phases of a step as in the steps that are looked at. Which ones these are has no period (`layout.preference`), since much in a loop has
one. Whatever lasts (a checkpoint, a collective of the script's own, an evaluation) ends the light marks of its step and is counted
exactly; the tick thread ends those of a step that does not come to its end (`LONG_NS`).
"""

from __future__ import annotations

from allranks.record import layout as at

LONG_NS = 60_000_000
"""A step whose marks are light is not so long; ten times what a quick one takes."""
STALE_NS = 400_000_000
"""No longer is it since the last clock, however many steps there are until one is looked at."""
FIRST, END = at.PYTHON, at.OPTIMIZER + 1
"""What a step is made of: the phases that have light marks."""
FORGET_NS = 100_000_000
"""After so much time looked at, what was before counts half."""
_UNUSUAL = 8
MOST_WHOLE = 63
"""So many steps at the most have whole marks after one whose light marks were ended."""


class Shares:
    """How the time of steps without clocks is shared out; of one writer."""

    __slots__ = (
        "_before", "_is_light", "_left", "_looked", "_mean_ns", "_shared_ns", "_whole", "guessed_ns",
    )  # fmt: skip

    def __init__(self) -> None:
        self.guessed_ns = [0] * at.NUM_PHASES
        self._looked = [0] * (END - FIRST)
        self._before: list[int] = []
        self._mean_ns = self._shared_ns = self._whole = self._left = 0
        self._is_light = False

    def may_be_light(self) -> bool:
        """Whether the step that begins may have light marks.

        Whole steps are shared out. Where something (a collective between backward and optimizer, say) ends the light marks of each,
        what was before would be shared out among what comes after, too: so they are tried less and less often.
        """
        if self._is_light:  # and something ended them
            self._whole = self._left = min(2 * self._whole + 1, MOST_WHOLE)
        elif self._left:
            self._left -= 1
        self._is_light = not self._left
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
        spent = [now - before for now, before in zip(spent_ns[FIRST:END], self._before, strict=True)]
        length = sum(spent)
        if self._mean_ns and length > _UNUSUAL * self._mean_ns:
            length = _UNUSUAL * self._mean_ns  # it counts for the mean, so that steps may become longer
        else:
            self._looked = [a + b for a, b in zip(self._looked, spent, strict=True)]
            if sum(self._looked) > FORGET_NS:
                self._looked = [ns // 2 for ns in self._looked]
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
