"""Which numbers does each plot of the page draw? Lists for assets/*.js, thinned to what a screen can show."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from allranks.perf.breakdown import PARTS, RankParts
from allranks.perf.straggler import OWN
from allranks.perf.values import History
from allranks.report.making import Report, Times
from allranks.report.metrics import Series
from allranks.report.moments import NAMES, StepMoments, moments_of, steps_to_show

MOST_POINTS = 500
"""Of a curve: about one per pixel column."""
MOST_PLOTS = 12
MOST_CURVES = 8
MOST_RANKS = 64
MOST_CALLS = 60
"""Collectives of one rank in one step, the longest."""
BORING = ("epoch",)
"""Logged to mark a line rather than to be looked at."""

Points = list[tuple[float, float | None]]


@dataclass(frozen=True, slots=True)
class LinePlot:
    """Curves with one x axis."""

    id: str
    title: str
    about: str
    x_name: str
    x_unit: str
    y_unit: str
    series: tuple[tuple[str, Points], ...]
    marks: tuple[dict[str, Any], ...] = ()
    from_zero: bool = False
    can_log: bool = False

    def to_json(self) -> dict[str, Any]:
        """For linePlot in assets/lines.js; a value that is no number is null."""
        return {
            "id": self.id,
            "label": f"{self.title}. {self.about}",
            "xName": self.x_name,
            "xUnit": self.x_unit,
            "yUnit": self.y_unit,
            "zero": self.from_zero,
            "marks": list(self.marks),
            "series": [
                {"name": name, "gap": "not finite", "points": [[x, y] for x, y in points]}
                for name, points in self.series
            ],
        }


def line_plots(report: Report) -> list[LinePlot]:
    """Loss, throughput, and what else was logged."""
    plots = [plot for plot in (loss_plot(report), speed_plot(report)) if plot is not None]
    shown = {name for plot in plots for name, _ in plot.series}
    others = [s for s in report.facts.logged.series.values() if s.name not in shown and s.name not in BORING]
    for number, series in enumerate(others[:MOST_PLOTS]):
        plots.append(
            LinePlot(
                f"metric-{number}",
                series.name,
                "by step, as the script logged it",
                "step",
                "step",
                "",
                ((series.name, thinned(points_of(series))),),
                _step_marks(report),
            )
        )
    return plots


def loss_plot(report: Report) -> LinePlot | None:
    """The logged losses; of a script that logs none, what the watcher saw of each rank's."""
    losses = report.facts.logged.losses[:MOST_CURVES]
    if losses:
        series = tuple((s.name, thinned(points_of(s))) for s in losses)
        about = "by step, as the script logged it"
    else:
        history = report.times.history if report.times else None
        series = tuple(seen_losses(history)) if history else ()
        about = "by step, of each rank's own batches, about once a second, as the watcher saw it"
    if not series:
        return None
    positive = all(y is None or y > 0 for _, points in series for _, y in points)
    return LinePlot("loss", "Loss", about, "step", "step", "", series, _step_marks(report), can_log=positive)


def seen_losses(history: History) -> list[tuple[str, Points]]:
    """(rank's name, points) of those ranks whose loss was looked at."""
    out = []
    for rank in history.ranks[:MOST_CURVES]:
        at = {s.step: s.loss for s in rank.samples if s.loss is not None}
        if at:
            points: Points = [(step, _finite(value)) for step, value in sorted(at.items())]
            out.append((f"rank {rank.rank}", thinned(points)))
    return out


def points_of(series: Series) -> Points:
    """A series as a curve."""
    return [(p.step, _finite(p.value)) for p in series.points]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def speed_plot(report: Report) -> LinePlot | None:
    """Steps a second over the time of the attempt."""
    speed = speeds(report.times) if report.times else []
    if not speed:
        return None
    return LinePlot(
        "throughput",
        "Throughput",
        "optimizer steps a second, over the time of the attempt",
        "at",
        "clock",
        "steps/s",
        (("steps/s", [(round(t, 3), round(v, 4)) for t, v in speed]),),
        _time_marks(report),
        from_zero=True,
    )


def speeds(times: Times) -> list[tuple[float, float]]:
    """(seconds since the attempt began, steps a second) in pieces of time; all ranks take the same steps."""
    rows = [row for row in times.pieces.values() if row]
    row = max(rows, key=len, default=[])
    return [((p.since + p.until) / 2, p.steps / (p.until - p.since)) for p in row if p.until > p.since]


def _step_marks(report: Report) -> tuple[dict[str, Any], ...]:
    """Verdicts and resumes on an axis of steps."""
    marks = [
        {"x": t.verdict.step, "label": t.verdict.code, "kind": "bad"}
        for t in report.facts.verdicts
        if t.verdict.step is not None
    ]
    for event in report.facts.events:
        if event.kind == "resume" and isinstance(event.fields.get("step"), int):
            marks.append({"x": event.fields["step"], "label": "resumed", "kind": "note"})
    return tuple(marks)


def _time_marks(report: Report) -> tuple[dict[str, Any], ...]:
    if report.times is None:
        return ()
    began = report.times.began
    marks = [
        {"x": t.unix_time - began, "label": t.verdict.code, "kind": "bad"}
        for t in report.facts.verdicts
        if t.unix_time is not None
    ]
    marks += [
        {"x": c.unix_time - began, "label": "saved", "kind": "note"}
        for c in report.facts.checkpoints[-4:]
        if c.unix_time is not None
    ]
    return tuple(mark for mark in marks if mark["x"] >= 0)


def thinned(points: Points, most: int = MOST_POINTS) -> Points:
    """At most about `most` points that look the same: of each stretch its lowest and highest, and every gap."""
    if len(points) <= most:
        return points
    out: Points = []
    length = 2 * len(points) / most
    for k in range(most // 2):
        piece = points[int(k * length) : int((k + 1) * length)]
        known = [p for p in piece if p[1] is not None]
        kept = {min(known, key=_y), max(known, key=_y)} if known else set()
        gap = next((p for p in piece if p[1] is None), None)
        out += sorted({*kept, gap} if gap is not None else kept, key=lambda p: p[0])
    if out[-1] != points[-1]:
        out.append(points[-1])
    return out


def _y(point: tuple[float, float | None]) -> float:
    return point[1] or 0.0


def rank_names(times: Times, ranks: Sequence[int]) -> list[str]:
    """'rank 3', with the host where there are several."""
    hosts = {node.node: node.host for node in times.history.nodes}
    of = {rank.rank: rank for rank in times.history.ranks}
    several = len(hosts) > 1
    return [f"rank {r} {hosts.get(of[r].node, '')}" if several and r in of else f"rank {r}" for r in ranks]


def busiest(times: Times) -> set[int]:
    """The ranks that plots with a bar each show: all, or of very many those that do most themselves."""
    ranks = [r for r in times.parts.ranks if r.steps]
    return {r.rank for r in sorted(ranks, key=own_s, reverse=True)[:MOST_RANKS]}


def stack(times: Times) -> dict[str, Any] | None:
    """Milliseconds of each part of a step, per rank."""
    chosen = busiest(times)
    ranks = [r for r in times.parts.ranks if r.rank in chosen]
    if not ranks:
        return None
    names = rank_names(times, [r.rank for r in ranks])
    rows = [
        {"name": name, "parts": [[part, round(r.per_step(part) * 1e3, 4)] for part in PARTS]}
        for name, r in zip(names, ranks, strict=True)
    ]
    return {"label": "Where the time of a step goes, per rank", "rows": rows, "names": PARTS}


def own_s(parts: RankParts) -> float:
    """Seconds a step in which the rank did something itself: not waiting, not communicating."""
    return sum(parts.per_step(p) for p in OWN)


HEATS = (
    ("own", "own work a step", own_s),
    ("step", "step time", lambda p: p.step_s),
    ("waiting", "waiting for a slower rank, a step", lambda p: p.per_step("waiting")),
    ("data", "data wait a step", lambda p: p.per_step("data")),
)
"""What the heat map can show: key, name, seconds of a piece."""


def heat(times: Times) -> dict[str, Any] | None:
    """Ranks x time."""
    ranks = [rank for rank, row in times.pieces.items() if row]
    if not ranks:
        return None
    kinds = HEATS if len(ranks) > 1 else [h for h in HEATS if h[0] != "waiting"]
    rows = [
        {
            "name": name,
            "spans": [[round(p.since, 2), round(p.until, 2)] for p in times.pieces[rank]],
            "values": {key: [_ms(of(p)) for p in times.pieces[rank]] for key, _, of in kinds},
        }
        for name, rank in zip(rank_names(times, ranks), ranks, strict=True)
    ]
    return {
        "label": "Ranks over time",
        "kinds": [{"key": key, "name": name, "unit": "ms"} for key, name, _ in kinds],
        "rows": rows,
    }


def steps(report: Report) -> dict[str, Any] | None:
    """The moments of some steps on all ranks."""
    if report.times is None:
        return None
    history = report.times.history
    shown = moments_of(history, steps_to_show(history, report.pinned))
    known = {r.rank for r in history.ranks}
    chosen = busiest(report.times) if len(known) > MOST_RANKS else known
    if not shown or not chosen:
        return None
    return {
        "names": NAMES,
        "rows": rank_names(report.times, sorted(chosen)),
        "steps": [_step(one, chosen) for one in shown],
    }


def _step(one: StepMoments, chosen: set[int]) -> dict[str, Any]:
    def ms(t: float) -> float:
        return _ms(t - one.begin)

    ranks = []
    for r in [r for r in one.ranks if r.rank in chosen]:
        calls = [
            [ms(c.entered), ms(c.exited if c.exited is not None else one.end), c.op, _meeting(c), c.line]
            for c in r.calls
        ]
        longest = sorted(calls, key=lambda c: c[0] - c[1])[:MOST_CALLS]
        ranks.append(
            {
                "parts": [[s.part, ms(s.begin), ms(s.end)] for s in r.segments],
                "calls": sorted(longest, key=lambda c: c[0]),
                "ready": None if r.ready is None else ms(r.ready),
            }
        )
    return {
        "step": one.step,
        "at_s": round((one.begin + one.end) / 2, 3),
        "note": one.sentence(),
        "ranks": ranks,
    }


def _meeting(call: Any) -> str:
    return f"{call.group}:{call.seq}:{call.op}" if call.seq >= 0 else ""


def _ms(value: float) -> float:
    return round(value * 1e3, 4)
