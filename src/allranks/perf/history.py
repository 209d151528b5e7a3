"""What did the agents write of a run's time? The reader of RUN/timeline/node<k>.jsonl; format: docs/design/timeline.md."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from allranks.perf.lines import lines_of, stretches
from allranks.perf.values import (
    PHASES,
    CallTimes,
    GpuState,
    History,
    HostSample,
    Node,
    RankHistory,
    Sample,
    StepTimes,
)

FORMAT = 1
FOLDER = "timeline"
# A sample's row: what comes before the seconds of PHASES, and after them.
BEFORE: tuple[str, ...] = ("rank", "step", "epoch", "loss")
AFTER: tuple[str, ...] = (
    "buffers_s",
    "exchanged_s",
    "exchanged_of_s",
    "cpu_s",
    "queue_s",
    "rss_mb",
    "major_faults",
    "drawn",
    "busy_s",
    "read",
    "calls",
    "printed",
)
# A step's row: microseconds since the attempt began, 0 = there was none.
STEP_ROW: tuple[str, ...] = (
    "step",
    "start",
    "data_from",
    "data_to",
    "forward_from",
    "forward_to",
    "buffers_from",
    "buffers_to",
    "backward_from",
    "ready",
    "backward_to",
    "optimizer_from",
    "end",
    "copy",
)
CALL_ROW: tuple[str, ...] = ("op", "group", "seq", "step", "entered", "exited", "line", "bytes", "is_async")


class NoHistory(ValueError):
    """The run has no timeline: it ran with --no-watch, or never came to its first sample."""


def read_history(
    run_dir: str | os.PathLike[str], attempt: int | None = None, wanted: Collection[int] = ()
) -> History:
    """The history of an attempt, the last one if none is asked for; also of a run that still goes on.

    Of a long run some of what was written is read, evenly over its time (lines.py), and the steps `wanted` in any case.

    Raises:
        NoHistory: There is none.
    """
    folder = Path(run_dir) / FOLDER
    found = [part for path in sorted(folder.glob("node*.jsonl")) for part in stretches(path)]
    if not found:
        raise NoHistory(f"there is no timeline in {folder}")
    numbers = sorted({part.attempt for part in found})
    number = numbers[-1] if attempt is None else attempt
    chosen = {int(p.head.get("node", 0)): p for p in found if p.attempt == number}
    if not chosen:
        raise NoHistory(f"{folder} has no attempt {number}, only {numbers}")
    looks = 2 if len(chosen) > 1 else 1
    return _history(
        number, len(numbers), [_Part(p.head).read(lines_of(p, wanted, looks)) for p in chosen.values()]
    )


class _Part:
    """What one node wrote of one attempt."""

    def __init__(self, head: dict[str, Any]) -> None:
        self.head = head
        self.node, self.attempt = int(head.get("node", 0)), int(head.get("attempt", 0))
        self.samples: dict[int, list[Sample]] = {}
        self.steps: dict[int, dict[int, StepTimes]] = {}
        self.calls: dict[int, list[CallTimes]] = {}
        self.facts: dict[int, dict[str, Any]] = {}
        self.looks: list[HostSample] = []

    def read(self, lines: Iterable[dict[str, Any]]) -> _Part:
        """Take all of them."""
        for line in lines:
            self.take(line)
        return self

    def take(self, line: dict[str, Any]) -> None:
        kind, rank = line.get("kind"), int(line.get("rank", -1))
        if kind == "sample":
            for row in line["rows"]:
                number, sample = sample_of(row, float(line["t"]), float(line.get("throttled_s", 0.0)))
                self.samples.setdefault(number, []).append(sample)
        elif kind == "steps":
            known = self.steps.setdefault(rank, {})
            known |= {step.step: step for step in map(step_of, line["rows"])}
        elif kind == "calls":
            self.calls.setdefault(rank, []).extend(map(call_of, line["rows"]))
        elif kind == "host":
            self.looks.append(look_of(line))
        elif kind == "facts":
            self.facts.setdefault(rank, {}).update(line["facts"])


def look_of(line: dict[str, Any]) -> HostSample:
    """The host's line."""
    gpus = {int(row[0]): GpuState(*map(int, row[1:])) for row in line.get("gpus", ())}
    known = {k: v for k, v in line.items() if k in HostSample.__dataclass_fields__}
    return HostSample(**{**known, "gpus": gpus})


def sample_of(row: list[Any], t: float, throttled_s: float = 0.0) -> tuple[int, Sample]:
    """The rank and the sample of a row."""
    before, rest = dict(zip(BEFORE, row, strict=False)), row[len(BEFORE) :]
    phases = dict(zip(PHASES, rest, strict=False))
    after = dict(zip(AFTER, rest[len(PHASES) :], strict=False))
    rank = int(before.pop("rank"))
    return rank, Sample(t=t, phases=phases, throttled_s=throttled_s, **before, **after)


def row_of_sample(rank: int, sample: Sample) -> list[Any]:
    """The way back."""
    phases = [_short(sample.phases.get(name, 0.0)) for name in PHASES]
    before = [rank, *(getattr(sample, name) for name in BEFORE[1:])]
    return [*before, *phases, *(_short(getattr(sample, name)) for name in AFTER)]


def _short(value: float) -> float:
    return round(value, 4) if isinstance(value, float) else value


def step_of(row: list[int]) -> StepTimes:
    """The moments of a row."""
    at = dict(zip(STEP_ROW, row, strict=False))

    def moment(name: str) -> float | None:
        return at[name] / 1e6 if at.get(name) else None

    def span(name: str) -> tuple[float, float] | None:
        begin, end = moment(f"{name}_from"), moment(f"{name}_to")
        return (begin, end) if begin is not None and end is not None and end >= begin else None

    return StepTimes(
        step=at["step"],
        start=at["start"] / 1e6,
        end=at["end"] / 1e6,
        data=span("data"),
        forward=span("forward"),
        buffers=span("buffers"),
        backward=span("backward"),
        ready=moment("ready"),
        optimizer=moment("optimizer_from"),
        copy_s=at.get("copy", 0) / 1e6,
    )


def row_of_step(step: StepTimes) -> list[int]:
    """The way back."""
    spans = {name: getattr(step, name) or (0.0, 0.0) for name in ("data", "forward", "buffers", "backward")}
    at = {f"{name}_{end}": span[i] for name, span in spans.items() for i, end in enumerate(("from", "to"))}
    at |= {"start": step.start, "end": step.end, "copy": step.copy_s}
    at |= {"ready": step.ready or 0.0, "optimizer_from": step.optimizer or 0.0}
    return [step.step, *(round(at[name] * 1e6) for name in STEP_ROW[1:])]


def call_of(row: list[Any]) -> CallTimes:
    """The collective of a row."""
    at = dict(zip(CALL_ROW, row, strict=False))
    at["entered"], at["exited"] = at["entered"] / 1e6, at["exited"] / 1e6 if at["exited"] else None
    return CallTimes(**at)


def row_of_call(call: CallTimes) -> list[Any]:
    """The way back."""
    at = {name: getattr(call, name) for name in CALL_ROW}
    at["entered"], at["exited"] = round(call.entered * 1e6), round((call.exited or 0.0) * 1e6)
    return list(at.values())


def _history(attempt: int, attempts: int, parts: list[_Part]) -> History:
    parts = sorted(parts, key=lambda part: part.node)
    shifts = _shifts(parts)
    ranks: dict[int, RankHistory] = {}
    for part in parts:
        who = {int(r["rank"]): r for r in part.head.get("ranks", ())}
        for number in sorted({*who, *part.samples}):
            ranks[number] = _rank(number, part, who.get(number, {}), shifts[part.node])
    nodes = tuple(
        Node(
            part.node,
            str(part.head.get("host", "")),
            float(part.head.get("unix_s", 0.0)),
            shifts[part.node],
            dict(part.head.get("facts", {})),
            tuple(replace(look, t=look.t + shifts[part.node]) for look in part.looks),
        )
        for part in parts
    )
    world_size = max([int(part.head.get("world_size", 0)) for part in parts])
    return History(attempt, attempts, world_size, nodes, tuple(ranks[n] for n in sorted(ranks)))


def _rank(number: int, part: _Part, who: dict[str, Any], shift: float) -> RankHistory:
    steps = sorted(part.steps.get(number, {}).values(), key=lambda s: s.step)
    calls = {(c.group, c.seq, c.op, c.entered): c for c in part.calls.get(number, ())}
    return RankHistory(
        rank=number,
        node=part.node,
        host=str(part.head.get("host", "")),
        pid=int(who.get("pid", 0)),
        samples=tuple(replace(s, t=s.t + shift) for s in part.samples.get(number, ())),
        steps=tuple(_shifted_step(s, shift) for s in steps),
        calls=tuple(_shifted_call(c, shift) for c in sorted(calls.values(), key=lambda c: c.entered)),
        facts={**{k: v for k, v in who.items() if k not in ("rank", "pid")}, **part.facts.get(number, {})},
    )


def _shifted_step(step: StepTimes, shift: float) -> StepTimes:
    if not shift:
        return step
    moved = {n: tuple(t + shift for t in v) for n in _SPANS if (v := getattr(step, n)) is not None}
    moved |= {n: v + shift for n in _MOMENTS if (v := getattr(step, n)) is not None}
    return replace(step, **moved)


_SPANS, _MOMENTS = ("data", "forward", "buffers", "backward"), ("start", "end", "ready", "optimizer")


def _shifted_call(call: CallTimes, shift: float) -> CallTimes:
    exited = call.exited + shift if call.exited is not None else None
    return replace(call, entered=call.entered + shift, exited=exited) if shift else call


def _shifts(parts: list[_Part]) -> dict[int, float]:
    """What to add to each node's times so that backwards that exchanged gradients end together.

    No host's clock is another's; but an all-reduce ends everywhere within a network's delay. Where two nodes have no such
    step in common, their clocks' difference to the time of day has to do.
    """
    ends = {part.node: _ends(part) for part in parts}
    first = parts[0]
    shifts = {}
    for part in parts:
        both = set(ends[part.node]) & set(ends[first.node])
        if part is first:
            shifts[part.node] = 0.0
        elif both:
            shifts[part.node] = median(ends[first.node][s] - ends[part.node][s] for s in both)
        else:
            shifts[part.node] = float(part.head.get("unix_s", 0.0)) - float(first.head.get("unix_s", 0.0))
    return shifts


def _ends(part: _Part) -> dict[int, float]:
    found: dict[int, list[float]] = {}
    for steps in part.steps.values():
        for step in steps.values():
            if step.exchange is not None:
                found.setdefault(step.step, []).append(step.exchange[1])
    return {number: median(ends) for number, ends in found.items()}
