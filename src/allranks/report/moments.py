"""What did all ranks do in one step? The parts of its time, one after the other, and the collectives in it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from allranks.perf.breakdown import PARTS
from allranks.perf.values import CallTimes, History, StepTimes
from allranks.watch.verdict import seconds

MOST_STEPS = 24
MOST_SEGMENTS = 6000
"""Of all steps that are shown: some 60 bytes each in the page."""
BETWEEN = "python"
"""What lies between two marks: copies to the device, logging, the script's own Python. Only their sum is known."""
NAMES = {**PARTS, BETWEEN: "other: Python, copies, evaluation, logging"}


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of a step of one rank; seconds since the attempt began."""

    part: str
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class RankMoments:
    """One rank in one step."""

    rank: int
    segments: tuple[Segment, ...]
    calls: tuple[CallTimes, ...]
    exchange: tuple[float, float] | None
    """From when its last gradient was there to the end of its backward."""

    @property
    def ready(self) -> float | None:
        """When its last gradient was there."""
        return self.exchange[0] if self.exchange is not None else None


@dataclass(frozen=True, slots=True)
class StepMoments:
    """One step on all ranks."""

    step: int
    begin: float
    end: float
    ranks: tuple[RankMoments, ...]

    @property
    def last(self) -> int | None:
        """The rank whose gradients came last; None where that is not known, or there is one rank."""
        known = [(r.ready, r.rank) for r in self.ranks if r.ready is not None]
        return max(known)[1] if len(known) == len(self.ranks) > 1 else None

    def waited(self) -> dict[int, float]:
        """Seconds each rank waited in the exchange of gradients for the last one."""
        return {
            r.rank: sum(s.end - s.begin for s in r.segments if s.part == "waiting")
            for r in self.ranks
            if r.ready is not None
        }

    def sentence(self) -> str:
        """Who waited for whom."""
        length = seconds_short(self.end - self.begin)
        last, waited = self.last, self.waited()
        if last is None:
            return f"Step {self.step}: {length}."
        rank, longest = max(waited.items(), key=lambda item: item[1])
        if longest < 0.02 * (self.end - self.begin):
            return (
                f"Step {self.step}: {length}. All ranks came to the gradient exchange at about the same time."
            )
        return (
            f"Step {self.step}: {length}. Rank {last} came last to the gradient exchange;"
            f" rank {rank} waited {seconds_short(longest)} for it."
        )


def steps_to_show(history: History, pinned: Sequence[int] = ()) -> list[int]:
    """Steps whose moments are known of all ranks: those asked for, the slowest, the first and last, some between.

    Args:
        pinned: Steps that are wanted; of one that is not known the nearest.
    """
    shared = history.shared_steps()
    if not shared:
        return []
    room = max(3, min(MOST_STEPS, MOST_SEGMENTS // (12 * len(history.ranks))))
    chosen = {min(shared, key=lambda s: abs(s - wanted)) for wanted in pinned}
    chosen |= {shared[0], shared[-1]}
    lengths = {s.step: s.end - s.start for s in history.ranks[0].steps}
    usual = [s for s in shared if s > 2] or list(shared)
    chosen |= set(sorted(usual, key=lambda s: -lengths[s])[: room // 4])
    middle = median(lengths[s] for s in usual)
    chosen |= set(sorted(usual, key=lambda s: abs(lengths[s] - middle))[:2])
    while len(chosen) < min(room, len(shared)):
        chosen |= _spread(shared, chosen, room - len(chosen))
    return sorted(chosen)


def _spread(shared: Sequence[int], chosen: set[int], count: int) -> set[int]:
    left = [s for s in shared if s not in chosen]
    return {left[(2 * k + 1) * len(left) // (2 * count)] for k in range(min(count, len(left)))}


def moments_of(history: History, steps: Iterable[int]) -> list[StepMoments]:
    """Some of history.shared_steps(), in their order."""
    wanted = set(steps)
    times: dict[int, dict[int, StepTimes]] = {step: {} for step in sorted(wanted)}
    calls: dict[int, dict[int, list[CallTimes]]] = {step: {} for step in times}
    for rank in history.ranks:
        chosen = [s for s in rank.steps if s.step in wanted]
        for step, inside in zip(chosen, calls_of(rank.calls, chosen), strict=True):
            times[step.step][rank.rank] = step
            calls[step.step][rank.rank] = inside
    return [_step(step, times[step], calls[step]) for step in times]


def _step(
    number: int, times: Mapping[int, StepTimes], calls: Mapping[int, Sequence[CallTimes]]
) -> StepMoments:
    readies = [s.exchange[0] for s in times.values() if s.exchange is not None]
    last_ready = max(readies) if len(readies) == len(times) else None
    entries = [s.buffers[0] for s in times.values() if s.buffers is not None]
    last_entry = max(entries) if len(entries) == len(times) else None
    ranks = tuple(
        RankMoments(
            rank, tuple(segments(step, last_ready, last_entry)), tuple(calls.get(rank, ())), step.exchange
        )
        for rank, step in times.items()
    )
    begin, end = min(s.start for s in times.values()), max(s.end for s in times.values())
    return StepMoments(number, begin, end, ranks)


def segments(step: StepTimes, last_ready: float | None, last_entry: float | None) -> list[Segment]:
    """The step from its start to its end without a gap.

    Args:
        last_ready: When the last rank's gradients were there: what lies before is waiting, after it communication.
        last_entry: The same for DDP's exchange of buffers.
    """
    found: list[Segment] = []
    if step.data:
        found.append(Segment("data", *step.data))
    if step.forward:
        begin, end = step.forward
        if step.buffers:
            found += [
                Segment("forward", begin, step.buffers[0]),
                *_met(step.buffers, last_entry, "collective"),
            ]
            begin = step.buffers[1]
        found.append(Segment("forward", begin, end))
    if step.backward:
        ready = step.exchange[0] if step.exchange else step.backward[1]
        found.append(Segment("backward", step.backward[0], ready))
        if step.exchange:
            found += _met(step.exchange, last_ready, "exchange")
    if step.optimizer is not None:
        found.append(Segment("optimizer", step.optimizer, step.end))
    return _filled(sorted(found, key=lambda s: s.begin), step.start, step.end)


def _met(span: tuple[float, float], last: float | None, part: str) -> list[Segment]:
    """Waiting until the last one came, then the exchange itself."""
    begin, end = span
    until = min(max(begin, last), end) if last is not None else begin
    return [Segment("waiting", begin, until), Segment(part, until, end)]


def _filled(found: Sequence[Segment], start: float, end: float) -> list[Segment]:
    """With what lies between, and nothing that overlaps or is outside."""
    out: list[Segment] = []
    at = start
    for one in found:
        begin, until = max(one.begin, at), min(one.end, end)
        if until <= begin:
            continue
        if begin > at:
            out.append(Segment(BETWEEN, at, begin))
        out.append(Segment(one.part, begin, until))
        at = until
    if end > at:
        out.append(Segment(BETWEEN, at, end))
    return out


def calls_of(calls: Sequence[CallTimes], steps: Sequence[StepTimes]) -> list[list[CallTimes]]:
    """Of each step the collectives that were entered during it; both are in the order of time."""
    entered = [call.entered for call in calls]
    return [list(calls[bisect_left(entered, s.start) : bisect_left(entered, s.end)]) for s in steps]


def seconds_short(value: float) -> str:
    """'0.42 ms', '12 ms', '1.3 s', '3 min'."""
    if value < 1e-3:
        return f"{value * 1e3:.2g} ms" if value > 0 else "0 ms"
    if value < 1:
        return f"{value * 1e3:.3g} ms"
    return seconds(value)
