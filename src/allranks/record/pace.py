"""When has the record's thread (ticking.py) something to do?

Ten times a second, but while steps are quick and go on: then most of its ticks only say in the page that they came. Compiled (_quick.c)
those run without the GIL, which costs the rank nothing; here is the same in Python.
"""

from __future__ import annotations

from _thread import allocate_lock
from time import monotonic_ns

from allranks.record import layout as at
from allranks.record.counts import extension
from allranks.record.light import STALE_NS

TYPE_CHECKING = False  # as in writer.py
if TYPE_CHECKING:
    from allranks.record.light import Light

EVERY_US = 100_000
LIGHT_EVERY = 4
"""While marks are light and steps end, one tick of so many brings times, counts and place into the page."""
WORDS = at.W_TICKS, at.W_TICK_NS, at.W_ASK, at.W_ANSWERED, at.W_SINCE_NS, at.W_SAMPLE_UNTIL_NS


class PlainPace:
    """The pace in Python; `_quick.Pace` is the same.

    Attributes:
        ticks: So far.
        step: Steps that had ended at the last tick that said no more than that it came. Who does more sets this and the next two.
        ns: When that was.
        ended: How many of them had since the tick before.
    """

    __slots__ = ("_every_s", "_is_over", "_light_every", "_lock", "_stale_ns", "ended", "ns", "step", "ticks")

    def __init__(self, every_us: int, light_every: int, stale_ns: int, words: tuple[int, ...]) -> None:
        assert words == WORDS  # which have names here
        self._every_s, self._light_every, self._stale_ns = every_us / 1e6, light_every, stale_ns
        # To wait for a lock costs a tenth of what an Event's wait does.
        self._lock, self._is_over = allocate_lock(), False
        self._lock.acquire()
        self.ticks, self.step, self.ns, self.ended = 0, -1, 0, 1 << 62

    def wait(self, light: Light, words: memoryview) -> bool:
        """Until there is something to do, which is true; false: the thread is to end.

        Args:
            words: Those of the page.
        """
        while not self._is_over:
            self._is_over = self._lock.acquire(timeout=self._every_s)
            try:
                if not self._is_over and not self._is_light_tick(light, words):
                    return True
            except ValueError:  # another page was opened meanwhile
                return True
        return False

    def _is_light_tick(self, light: Light, words: memoryview) -> bool:
        step, now = light.step, monotonic_ns()
        ended = step - self.step
        self.ticks += 1
        if (
            not light.is_on
            or 2 * ended <= self.ended
            or now - max(words[at.W_SINCE_NS], light.asked_ns) >= self._stale_ns
            or self.ticks % self._light_every == 0
            or words[at.W_SAMPLE_UNTIL_NS]
            or words[at.W_ASK] > words[at.W_ANSWERED]
        ):
            return False
        self.step, self.ns, self.ended = step, now, ended
        words[at.W_TICK_NS], words[at.W_TICKS] = now, self.ticks
        return True

    def stop(self) -> None:
        """Nothing more is to be done; may be called again."""
        self._lock.acquire(blocking=False)
        self._lock.release()


Pace = PlainPace if TYPE_CHECKING or extension is None else extension.Pace


def new() -> PlainPace:
    """That of a thread which begins now."""
    return Pace(EVERY_US, LIGHT_EVERY, STALE_NS, WORDS)
