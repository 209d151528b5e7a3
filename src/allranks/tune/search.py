"""In which order are settings tried, and when is enough known? Pure: trials are made by a function that is given.

Climbing one knob at a time, the most promising first, twice over, since one knob may be in the way of another; a trial that is plainly
slower is cut short. Noise decides what counts as better: a gain must be larger than the spread of both figures. What came so near the
best that a bad moment may have decided is measured again, in turn with it; then the beginning and the best are, and each setting that
was kept is taken back once to see what it is worth. The figure of settings is the median of all looks at them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from statistics import median
from typing import Any, Protocol

from allranks.tune.knobs import Knob

MIN_GAIN = 0.02
"""A smaller gain is not kept: it would not be found again tomorrow."""
NEAR_MISSES = 3
"""So many settings at most are looked at again beside the best."""
DRIFT = 0.05
"""What two looks at the same settings may lie apart, whatever the spread within each: the machine's other work comes and goes."""
_OUT_OF_MEMORY = (
    "out of memory",
    "outofmemory",
    "memoryerror",
    "cannot allocate",
    "not enough memory",
    "sigkill",
    "signal 9",
    "code -9",
    "code 137",
)


@dataclass(frozen=True, slots=True)
class Measured:
    """What one trial gave."""

    settings: dict[str, Any]
    rate: float
    """Updates per second; 0 where it failed."""
    spread: float = 0.0
    """Relative: how sure the rate is, from parts of the time it was measured in."""
    updates: int = 0
    is_cut_short: bool = False
    failure: str = ""


class Measure(Protocol):
    """Makes one trial."""

    def __call__(self, settings: dict[str, Any], give_up_below: float, /) -> Measured:
        """Run with these settings; may stop early once the rate is surely below `give_up_below`."""
        ...


@dataclass(frozen=True, slots=True)
class Worth:
    """What one setting is worth, in what was found."""

    name: str
    value: Any
    before: Any
    gain: float | None
    """Rate with it over rate without it, everything else as found; None where there was no time to see, or it fails without it."""
    changes: str = ""


@dataclass(slots=True)
class Found:
    """The end of a search."""

    start: Measured
    best: Measured
    kept: list[Worth] = field(default_factory=list)
    did_not_pay: list[tuple[str, Any, float]] = field(default_factory=list)
    """(name, best other value, its rate over the best without it); below 1 + MIN_GAIN."""
    failed: list[Measured] = field(default_factory=list)
    trials: int = 0
    is_complete: bool = True
    """False: the time was up before every knob had its turn."""

    @property
    def gain(self) -> float:
        """Updates per second of the best over those of the beginning, both measured again at the end; 0 if that does not run."""
        return self.best.rate / self.start.rate if self.start.rate else 0.0


class Search:
    """One search within a time."""

    def __init__(
        self,
        knobs: Sequence[Knob],
        measure: Measure,
        *,
        budget_s: float,
        clock: Callable[[], float],
        on_trial: Callable[[Measured, Measured | None], None] = lambda measured, best: None,
    ) -> None:
        self.knobs, self._measure, self._clock, self._on_trial = list(knobs), measure, clock, on_trial
        self._budget_s, self._ends_at = budget_s, clock() + budget_s
        self._costs_s: list[float] = []
        self._starts = {k.name: k.start for k in self.knobs}
        self._looks: dict[str, list[Measured]] = {}

    def run(self, start: Measured | None = None) -> Found:
        """Search; the beginning may have been measured already."""
        if start is not None:
            self._looks[_key({})] = [start]
        first = start or self._trial({})
        found = Found(first, first)
        base = self._smaller(first) if first.failure else first
        if not base.failure:
            best = self._look_again(self._climb_all(base, found))
            self._confirm(first, base, best, found)
        found.trials = len(self._costs_s)
        found.failed = [m for m in chain.from_iterable(self._looks.values()) if m.failure and m.settings]
        return found

    def _climb_all(self, base: Measured, found: Found) -> Measured:
        """Every knob, twice over."""
        best, turned = base, dict.fromkeys((k.name for k in self.knobs), False)
        for _ in range(2):
            before = best
            for knob in self.knobs:
                if self._is_late():
                    break
                best = self._climb(knob, best, found)
                turned[knob.name] = True
            if best is before or self._is_late():
                break
        found.is_complete = all(turned.values())
        return best

    def _smaller(self, first: Measured) -> Measured:
        """What does not fit into memory may with smaller micro-batches: the largest that runs, else the failure."""
        knob = next((k for k in self.knobs if k.name == "micro_batch_size"), None)
        if knob is None or not any(sign in first.failure.lower() for sign in _OUT_OF_MEMORY):
            return first
        for value in sorted((v for v in knob.values if knob.start is None or v < knob.start), reverse=True):
            if self._is_late():
                break
            measured = self._trial({knob.name: value})
            if not measured.failure:
                return measured
        return first

    def _is_late(self) -> bool:
        """Whether what is left is for the last trials, which tell what was luck: as long as four take, but half of the time at most."""
        reserve_s = 4 * median(self._costs_s or [0.0])
        return self._clock() >= self._ends_at - min(reserve_s, self._budget_s / 2)

    def _trial(
        self, settings: dict[str, Any], best: Measured | None = None, *, again: bool = False
    ) -> Measured:
        """All that is known of these settings, after one look at least; after one more, to its end, if `again`."""
        # What is as at the beginning is left out: the same trial by another name would be made again.
        starts = self._starts
        settings = {n: v for n, v in settings.items() if starts.get(n) is None or v != starts[n]}
        looks = self._looks.setdefault(_key(settings), [])
        if again or not looks:
            began = self._clock()
            looks.append(self._measure(settings, 0.8 * best.rate if best and not again else 0.0))
            self._costs_s.append(self._clock() - began)
            self._on_trial(looks[-1], best)
        return _middle(looks)

    def _climb(self, knob: Knob, best: Measured, found: Found) -> Measured:
        """From the value of the best so far, in each direction as long as it pays."""
        begin = best
        closest: tuple[Any, float] | None = None
        if knob.needs and not best.settings.get(knob.needs, self._starts.get(knob.needs, True)):
            return best
        for direction in knob.neighbours(best.settings.get(knob.name, knob.start)):
            is_flat = False
            for value in direction:
                if self._is_late():
                    break
                measured = self._trial({**best.settings, knob.name: value}, best)
                if measured.failure:
                    break
                if is_better(measured, best):
                    best, is_flat = measured, False
                    continue
                ratio = measured.rate / best.rate
                closest = max(closest or (value, 0.0), (value, ratio), key=lambda pair: pair[1])
                if is_flat or not _may_be_better(measured, best):
                    break
                is_flat = True  # neither better nor worse, as far as can be told: one step more
            if best is not begin and knob.is_ordered:
                break  # better in this direction: the other one leads back
        if best is begin and closest is not None and closest[0] != knob.start:
            found.did_not_pay.append((knob.name, *closest))
        return best

    def _look_again(self, best: Measured) -> Measured:
        """What came near the best, in turn with it: one bad moment must not decide."""
        seen: set[str] = set()
        for _ in range(NEAR_MISSES):
            near = [m for m in map(_middle, self._looks.values()) if _may_be_better(m, best)]
            near = [m for m in near if _key(m.settings) not in seen | {_key(best.settings)}]
            if not near or self._is_late():
                break
            other = max(near, key=lambda m: m.rate)
            seen.add(_key(other.settings))
            other = self._trial(other.settings, best, again=True)
            best = self._trial(best.settings, best, again=True)
            if is_better(other, best):
                best = other
        return best

    def _confirm(self, first: Measured, base: Measured, best: Measured, found: Found) -> None:
        """Beginning and best again, in turn; then the best without each of its settings."""
        if first.failure:  # there is no beginning to hold it against
            found.best = best
        elif best.settings == base.settings:
            found.start = found.best = best
            return
        else:
            for _ in range(2):
                if self._clock() >= self._ends_at or self._is_plain(best):
                    break
                self._trial({}, best, again=True)
                self._trial(best.settings, best, again=True)
            found.start, found.best = self._trial({}), self._trial(best.settings)
            if self._was_luck(found):
                return
        self._take_back(found)
        if not first.failure:  # both may have been looked at once more
            found.start = self._trial({})
            self._was_luck(found)

    def _was_luck(self, found: Found) -> bool:
        """Whether the best is hardly above the beginning, after all; then that is the best."""
        best = found.best
        if best.rate >= found.start.rate * (1 + MIN_GAIN):
            return False
        names, values = (" + ".join(map(str, p)) for p in zip(*best.settings.items(), strict=True))
        found.did_not_pay.append((names, values, found.gain))
        found.best, found.kept = found.start, []
        return True

    def _is_plain(self, best: Measured) -> bool:
        """Whether a second look at the best has shown a gain over the beginning that needs no third."""
        starts, bests = self._looks[_key({})], self._looks[_key(best.settings)]
        return len(bests) > 1 and min(m.rate for m in bests) > 1.2 * max(m.rate for m in starts)

    def _take_back(self, found: Found) -> None:
        """The best without each of its settings: what is each worth?"""
        knobs = {k.name: k for k in self.knobs}
        for name, value in dict(found.best.settings).items():
            without = {k: v for k, v in found.best.settings.items() if k != name}
            other = self._without(without, found) if self._clock() < self._ends_at else None
            gain = None
            if other is not None and not other.failure:  # a failure: it does not run without it
                gain = found.best.rate / other.rate
                if gain < 1 + MIN_GAIN / 2 and len(found.best.settings) > 1:
                    found.did_not_pay.append((name, value, gain))
                    found.best = other
                    continue
            knob = knobs[name]
            found.kept.append(Worth(name, value, knob.start, gain, knob.changes))

    def _without(self, settings: dict[str, Any], found: Found) -> Measured:
        """These settings beside the best; where the two are close, both once more."""
        other = self._trial(settings, found.best)
        if self._clock() < self._ends_at and _may_be_better(other, found.best):
            found.best = self._trial(found.best.settings, found.best, again=True)
            other = self._trial(settings, found.best, again=True)
        return other


def is_better(one: Measured, other: Measured) -> bool:
    """Whether a rate is above another by more than MIN_GAIN and than their spreads can explain."""
    return not one.failure and one.rate > other.rate * (1 + max(MIN_GAIN, _noise(one, other)))


def _may_be_better(one: Measured, best: Measured) -> bool:
    """Whether another look might show it to be above the best by what counts."""
    likely = one.rate * (1 + max(DRIFT, 2 * _noise(one, best)))
    return not (one.failure or one.is_cut_short) and likely > best.rate * (1 + MIN_GAIN)


def _noise(one: Measured, other: Measured) -> float:
    return (one.spread**2 + other.spread**2) ** 0.5


def _middle(measured: Sequence[Measured]) -> Measured:
    """Several looks at the same settings as one."""
    if len(measured) == 1:
        return measured[0]
    sound = [m for m in measured if not m.failure] or list(measured)
    rate = median(m.rate for m in sound)
    apart = max(abs(m.rate - rate) / rate if rate else 0.0 for m in sound)
    spread = max(apart, median(m.spread for m in sound))
    updates = sum(m.updates for m in sound)
    is_cut_short = all(m.is_cut_short for m in sound)
    return Measured(sound[0].settings, rate, spread, updates, is_cut_short, sound[0].failure)


def _key(settings: dict[str, Any]) -> str:
    return repr(sorted(settings.items()))
