"""In which order are settings tried, and when is enough known? Pure: trials are made by a function that is given.

Climbing one knob at a time, the most promising first, twice over, since one knob may be in the way of another; a trial that is plainly
slower is cut short. Noise decides what counts as better: a gain must be larger than the spread of both figures. At the end the best
and the beginning are measured again in turn, and each setting that was kept is taken back once to see what it is worth.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Protocol

from allranks.tune.knobs import Knob

MIN_GAIN = 0.02
"""A smaller gain is not kept: it would not be found again tomorrow."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What one trial gave."""

    settings: dict[str, Any]
    rate: float
    """Updates per second; 0 where it failed."""
    spread: float = 0.0
    """Relative: half the distance of the quartiles of the windows it was measured in, over their median."""
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
    """Rate with it over rate without it, everything else as found; None where there was no time to see."""
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
        """Updates per second of the best over those of the beginning, both measured again at the end."""
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
        self._reserve_s = 0.0
        self._known: dict[str, Measured] = {}
        self._trials = 0

    def run(self, start: Measured | None = None) -> Found:
        """Search; the beginning may have been measured already."""
        began = self._clock()
        first = start or self._trial({}, 0.0)
        self._known[_key({})] = first
        cost_s = max(1.0, self._clock() - began) if start is None else 0.0
        found = Found(first, first)
        if first.failure:
            return found
        best, turned = first, dict.fromkeys((k.name for k in self.knobs), False)
        self._keep_time(cost_s)
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
        self._confirm(first, best, found)
        found.trials = self._trials
        return found

    def _is_late(self) -> bool:
        return self._clock() >= self._ends_at - self._reserve_s

    def _keep_time(self, trial_s: float) -> None:
        """For the last trials, which tell what was luck: as long as four take, but half of the time at most."""
        self._reserve_s = min(max(self._reserve_s, 4 * trial_s), self._budget_s / 2)

    def _trial(self, settings: dict[str, Any], give_up_below: float, *, again: bool = False) -> Measured:
        # What is as at the beginning is left out: the same trial by another name would be made again.
        starts = {k.name: k.start for k in self.knobs}
        settings = {n: v for n, v in settings.items() if starts.get(n) is None or v != starts[n]}
        known = self._known.get(_key(settings))
        if known is not None and not again:
            return known
        began = self._clock()
        measured = self._measure(settings, give_up_below)
        self._trials += 1
        self._keep_time(self._clock() - began)
        if not again:
            self._known[_key(settings)] = measured
        return measured

    def _climb(self, knob: Knob, best: Measured, found: Found) -> Measured:
        """From the value of the best so far, in each direction as long as it pays."""
        begin = best
        closest: tuple[Any, float] | None = None
        for direction in knob.neighbours(best.settings.get(knob.name, knob.start)):
            for value in direction:
                if self._is_late():
                    break
                measured = self._trial({**best.settings, knob.name: value}, best.rate * 0.8)
                self._on_trial(measured, best)
                if measured.failure:
                    found.failed.append(measured)
                    break
                if not is_better(measured, best):
                    ratio = measured.rate / best.rate
                    closest = max(closest or (value, 0.0), (value, ratio), key=lambda pair: pair[1])
                    break
                best = measured
            if best is not begin and knob.is_ordered:
                break  # better in this direction: the other one leads back
        if best is begin and closest is not None and closest[0] != knob.start:
            found.did_not_pay.append((knob.name, *closest))
        return best

    def _confirm(self, first: Measured, best: Measured, found: Found) -> None:
        """Beginning and best again, in turn; then the best without each of its settings."""
        starts, bests = [first], [best]
        if best is not first:
            for _ in range(2):
                if self._clock() >= self._ends_at or _is_plain(starts, bests):
                    break
                starts.append(self._trial({}, 0.0, again=True))
                bests.append(self._trial(best.settings, 0.0, again=True))
        found.start, found.best = _middle(starts), _middle(bests)
        if found.best.rate < found.start.rate * (1 + MIN_GAIN):  # it was luck
            if best is not first:
                names, values = (
                    " + ".join(map(str, part)) for part in zip(*best.settings.items(), strict=True)
                )
                found.did_not_pay.append((names, values, found.gain))
            found.best = found.start
            return
        self._take_back(found)

    def _take_back(self, found: Found) -> None:
        """The best without each of its settings: what is each worth?"""
        names = {k.name: k for k in self.knobs}
        for name, value in dict(found.best.settings).items():
            without = {k: v for k, v in found.best.settings.items() if k != name}
            gain = None
            if self._clock() < self._ends_at:
                other = self._trial(without, 0.0)
                if other.failure:  # it does not run without it
                    found.failed.append(other)
                else:
                    gain = found.best.rate / other.rate
                    if gain < 1 + MIN_GAIN / 2 and len(found.best.settings) > 1:
                        found.did_not_pay.append((name, value, gain))
                        found.best = other
                        continue
            knob = names[name]
            found.kept.append(Worth(name, value, knob.start, gain, knob.changes))


def is_better(one: Measured, other: Measured) -> bool:
    """Whether a rate is above another by more than MIN_GAIN and than their spreads can explain."""
    noise = (one.spread**2 + other.spread**2) ** 0.5
    return not one.failure and one.rate > other.rate * (1 + max(MIN_GAIN, noise))


def _is_plain(starts: Sequence[Measured], bests: Sequence[Measured]) -> bool:
    """Whether a second look at both has shown a gain that needs no third."""
    return len(bests) > 1 and min(m.rate for m in bests) > 1.2 * max(m.rate for m in starts)


def _middle(measured: Sequence[Measured]) -> Measured:
    sound = [m for m in measured if not m.failure] or list(measured)
    rate = median(m.rate for m in sound)
    spread = max(
        max(abs(m.rate - rate) / rate if rate else 0.0 for m in sound), median(m.spread for m in sound)
    )
    return Measured(sound[0].settings, rate, spread, sum(m.updates for m in sound))


def _key(settings: dict[str, Any]) -> str:
    return repr(sorted(settings.items()))
