"""Where does the time of a step go, per rank? The parts add up to the step, since each rank's clock is always in one of them.

Cumulative times give how much; moments of timed steps give how the backward's end divides into waiting for a slower rank and the
exchange itself: who arrives last at a meeting waits for nobody, the others for as long as they were earlier.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

from allranks.perf.values import CallTimes, History, RankHistory, Sample

PARTS = {
    "data": "data wait",
    "copy": "copy to device",
    "forward": "forward",
    "backward": "backward compute",
    "exchange": "gradient exchange not hidden",
    "waiting": "waiting for a slower rank",
    "optimizer": "optimizer",
    "collective": "other communication",
    "checkpoint": "checkpoint",
    "evaluate": "evaluation",
    "log": "logging",
    "python": "other Python",
}
"""The parts of a step, in the order in which they are drawn, with their names for people."""

_AS_THEY_ARE = ("data", "copy", "optimizer", "checkpoint", "evaluate", "log", "python")
_STARTING = ("start", "import", "init", "build", "exit")


@dataclass(frozen=True, slots=True)
class RankParts:
    """Of one rank, over some steps."""

    rank: int
    since: float
    until: float
    steps: int
    parts: dict[str, float] = field(default_factory=dict)  # seconds in each of PARTS, of all these steps
    starting_s: float = 0.0  # of the same time: imports, building, joining; no part of a step
    is_exchange_known: bool = True  # else all of the backward counts as compute

    @property
    def step_s(self) -> float:
        """Seconds a step, on average."""
        return (self.until - self.since - self.starting_s) / self.steps if self.steps else 0.0

    def per_step(self, part: str) -> float:
        """Seconds of `part` a step."""
        return self.parts.get(part, 0.0) / self.steps if self.steps else 0.0

    def share(self, part: str) -> float:
        """Share of `part` in the step time."""
        total = sum(self.parts.values())
        return self.parts.get(part, 0.0) / total if total else 0.0


@dataclass(frozen=True, slots=True)
class Breakdown:
    """All ranks over the same time."""

    ranks: tuple[RankParts, ...]
    median_step_s: float  # of the steps whose moments are known, else of the averages
    first_step_s: float  # the slowest rank's first step: compilation, allocation, warming up; 0 if not known
    waits: Waits = field(compare=False, repr=False)  # who waited for whom, in the whole run

    def rank(self, number: int) -> RankParts | None:
        """The parts of a rank."""
        return next((r for r in self.ranks if r.rank == number), None)

    def mean(self) -> dict[str, float]:
        """Seconds a step of each part, over the ranks."""
        ranks = [r for r in self.ranks if r.steps]
        return {p: sum(r.per_step(p) for r in ranks) / len(ranks) if ranks else 0.0 for p in PARTS}

    def largest(self, count: int = 3) -> list[tuple[str, float]]:
        """The parts that take most, with their share of the step."""
        mean = self.mean()
        total = sum(mean.values()) or 1.0
        return [(p, mean[p] / total) for p in sorted(mean, key=lambda p: -mean[p])[:count] if mean[p] > 0]


def breakdown(history: History, since: float | None = None, until: float | None = None) -> Breakdown:
    """The parts over a stretch of time; by default from the first sample at which a step had ended to the last.

    The first step is left out: it compiles, allocates and warms up (`first_step_s`).
    """
    ranks = []
    waits = Waits(history)
    for rank in history.ranks:
        chosen = _chosen(rank.samples, since, until)
        if len(chosen) >= 2 and chosen[-1].step > chosen[0].step:
            ranks.append(between(rank, chosen[0], chosen[-1], waits))
    firsts = [s.end - s.start for r in history.ranks for s in r.steps if s.step == 1]
    return Breakdown(tuple(ranks), median_step(history, ranks), max(firsts, default=0.0), waits)


def over_time(history: History, waits: Waits, pieces: int = 60) -> dict[int, list[RankParts]]:
    """Per rank, the parts in up to `pieces` consecutive stretches of about equal length: rows of a heat map."""
    out: dict[int, list[RankParts]] = {}
    for rank in history.ranks:
        chosen = _chosen(rank.samples, None, None)
        if len(chosen) < 2:
            continue
        begin, length = chosen[0].t, (chosen[-1].t - chosen[0].t) / pieces
        kept = [chosen[0]]
        for sample in chosen[1:]:
            is_due = int((sample.t - begin) / length) > int((kept[-1].t - begin) / length)
            if (is_due or sample is chosen[-1]) and sample.step > kept[-1].step:
                kept.append(sample)
        out[rank.rank] = [between(rank, a, b, waits) for a, b in pairwise(kept)]
    return out


def between(rank: RankHistory, before: Sample, after: Sample, waits: Waits) -> RankParts:
    """The parts of one rank between two of its samples."""

    def spent(name: str) -> float:
        return max(0.0, after.phases.get(name, 0.0) - before.phases.get(name, 0.0))

    steps = after.step - before.step
    parts = {name: spent(name) for name in _AS_THEY_ARE}
    buffers = min(max(0.0, after.buffers_s - before.buffers_s), spent("forward"))
    parts["forward"] = spent("forward") - buffers
    exchange = _exchange(before, after, spent("backward"))
    parts["backward"] = spent("backward") - (exchange or 0.0)
    gradient = (exchange or 0.0) * waits.share_of_exchange(rank.rank, before.t, after.t)
    around = buffers * waits.share_of_buffers(rank.rank, before.t, after.t)
    around += spent("collective") * waits.share_of_calls(rank.rank, before.t, after.t)
    parts["exchange"] = (exchange or 0.0) - gradient
    parts["collective"] = spent("collective") + buffers - around
    parts["waiting"] = gradient + around
    return RankParts(
        rank.rank,
        before.t,
        after.t,
        steps,
        {name: parts[name] for name in PARTS},
        sum(spent(name) for name in _STARTING),
        exchange is not None,
    )


def _exchange(before: Sample, after: Sample, backward: float) -> float | None:
    """Time of the backward after the last gradient, of all steps: the share that it has in the timed ones. None: not known."""
    of = after.exchanged_of_s - before.exchanged_of_s
    exchanged = after.exchanged_s - before.exchanged_s
    if of <= 0:  # none was timed in this short time
        of, exchanged = after.exchanged_of_s, after.exchanged_s
    return backward * min(1.0, max(0.0, exchanged / of)) if of > 0 else None


def median_step(history: History, ranks: Sequence[RankParts]) -> float:
    """Median seconds from the end of a step to the end of the next, the first steps left out."""
    found = [s.end - s.start for r in history.ranks for s in r.steps if s.step > 2]
    if not found:
        found = [r.step_s for r in ranks if r.steps]
    return median(found) if found else 0.0


def _chosen(samples: Sequence[Sample], since: float | None, until: float | None) -> list[Sample]:
    inside = [
        s
        for s in samples
        if s.step >= 1 and (since is None or s.t >= since) and (until is None or s.t <= until)
    ]
    # The time after the last step (a final save, the end of the script) is no step's.
    last = max((s.step for s in inside), default=0)
    ended = [s for s in inside if s.step == last]
    return [s for s in inside if s.step < last] + ended[:1]


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where all ranks come together once: when each came, and when it went on."""

    t: float
    came: dict[int, float]
    left: dict[int, float]

    @property
    def last(self) -> int:
        """Who came last."""
        return max(self.came, key=lambda rank: self.came[rank])

    def waited(self, rank: int) -> float:
        """How long a rank waited for the last one."""
        newest = max(self.came.values())
        return max(0.0, min(newest, self.left[rank]) - self.came[rank])


class Waits:
    """Who waited for whom, at the meetings whose moments are known of all ranks."""

    def __init__(self, history: History) -> None:
        self.gradients = _meetings_of_steps(history, "exchange")
        self.buffers = _meetings_of_steps(history, "buffers")
        self.calls = _meetings_of_calls(history)

    def share_of_exchange(self, rank: int, since: float, until: float) -> float:
        """Share of the exchange after the backward that is waiting."""
        return _share(self.gradients, rank, since, until)

    def share_of_buffers(self, rank: int, since: float, until: float) -> float:
        """Share of DDP's exchange of buffers that is waiting."""
        return _share(self.buffers, rank, since, until)

    def share_of_calls(self, rank: int, since: float, until: float) -> float:
        """Share of the script's own collectives that is waiting."""
        return _share(self.calls, rank, since, until)


def _share(meetings: Sequence[Meeting], rank: int, since: float, until: float) -> float:
    begin, end = bisect_left(meetings, since, key=_at), bisect_right(meetings, until, key=_at)
    chosen = meetings[begin:end] or meetings
    total = sum(m.left[rank] - m.came[rank] for m in chosen)
    return min(1.0, sum(m.waited(rank) for m in chosen) / total) if total > 0 else 0.0


def _at(meeting: Meeting) -> float:
    return meeting.t


def _meetings_of_steps(history: History, name: str) -> list[Meeting]:
    spans: dict[int, dict[int, tuple[float, float]]] = {}
    for rank in history.ranks:
        for step in rank.steps:
            if (span := getattr(step, name)) is not None:
                spans.setdefault(step.step, {})[rank.rank] = span
    return _whole(spans.values(), len(history.ranks))


def _meetings_of_calls(history: History) -> list[Meeting]:
    spans: dict[tuple[str, int, str], dict[int, tuple[float, float]]] = {}
    for rank in history.ranks:
        for call in rank.calls:
            if _is_meeting(call):
                key = (call.group, call.seq, call.op)
                spans.setdefault(key, {})[rank.rank] = (call.entered, call.exited or call.entered)
    return _whole(spans.values(), len(history.ranks))


def _is_meeting(call: CallTimes) -> bool:
    return call.seq >= 0 and call.exited is not None and not call.is_async and call.group == "default"


def _whole(spans: Iterable[dict[int, tuple[float, float]]], world_size: int) -> list[Meeting]:
    """Those that all ranks came to, by time."""
    found = []
    for span in spans:
        if len(span) == world_size > 1:
            came = {rank: begin for rank, (begin, _) in span.items()}
            left = {rank: end for rank, (_, end) in span.items()}
            found.append(Meeting(max(left.values()), came, left))
    return sorted(found, key=lambda meeting: meeting.t)
