"""What became of each logged value? The numbers of metrics.jsonl as series, with their best and last."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Direction = Literal["lowest", "highest", ""]

_LOW = re.compile(r"loss|error|perplexity|\bppl\b|nll|\bmse\b|\bmae\b|rmse|\bbpb\b|\bwer\b|\bfid\b", re.I)
_HIGH = re.compile(
    r"acc|\bf1\b|auc|\bmap\b|bleu|rouge|precision|recall|\biou\b|score|correct|psnr|ssim", re.I
)
_OWN = ("step", "time")
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
"""As the lines have them: JSON knows neither."""


@dataclass(frozen=True, slots=True)
class Point:
    """One value of a series."""

    step: int
    unix_time: float
    value: float


@dataclass(slots=True)
class Series:
    """One logged name; the points are in the order of their steps."""

    name: str
    points: list[Point] = field(default_factory=list)

    @property
    def direction(self) -> Direction:
        """Which end is good, as far as the name tells."""
        if _LOW.search(self.name.replace("_", " ")):
            return "lowest"
        return "highest" if _HIGH.search(self.name.replace("_", " ")) else ""

    @property
    def last(self) -> Point:
        """The newest value."""
        return self.points[-1]

    @property
    def finite(self) -> list[Point]:
        """The points that are numbers."""
        return [p for p in self.points if math.isfinite(p.value)]

    @property
    def first_not_finite(self) -> Point | None:
        """The first NaN or infinity."""
        return next((p for p in self.points if not math.isfinite(p.value)), None)

    def best(self) -> Point | None:
        """The best value; None where the name does not tell which end is good."""
        finite = self.finite
        if not finite or not self.direction:
            return None
        pick = min if self.direction == "lowest" else max
        return pick(finite, key=lambda p: p.value)


@dataclass(frozen=True, slots=True)
class Logged:
    """All of metrics.jsonl."""

    series: Mapping[str, Series]
    num_lines: int
    num_replaced: int = 0
    """Values of steps that were taken again after a resume; the later one stays."""

    @property
    def losses(self) -> list[Series]:
        """Those that are losses by their name; without one, the first series that should fall."""
        named = [s for s in self.series.values() if "loss" in s.name.lower()]
        return named or [s for s in self.series.values() if s.direction == "lowest"][:1]


def read_series(rows: Iterable[Mapping[str, Any]]) -> Logged:
    """The series of the lines of metrics.jsonl.

    A resume takes steps again: from then on the later line counts, and what was logged beyond it is dropped, since that part
    of the training was lost.
    """
    series: dict[str, Series] = {}
    count = replaced = 0
    farthest: int | None = None
    for row in rows:
        step, when = _number(row.get("step")), _number(row.get("time"))
        if step is None or not math.isfinite(step):
            continue
        count += 1
        if farthest is not None and step < farthest:
            replaced += _forget_from(series, int(step))
        farthest = int(step)
        for name, value in _flat(row):
            known = series.setdefault(name, Series(name))
            known.points.append(Point(int(step), when or 0.0, value))
    kept = {name: s for name, s in series.items() if s.points}
    return Logged(kept, count, replaced)


def _forget_from(series: Mapping[str, Series], step: int) -> int:
    gone = 0
    for one in series.values():
        before = len(one.points)
        one.points[:] = [p for p in one.points if p.step < step]
        gone += before - len(one.points)
    return gone


def _flat(row: Mapping[str, Any], above: str = "") -> list[tuple[str, float]]:
    """(name, number) of a line; {"train": {"loss": 1.0}} is train.loss, strings and lists are left out."""
    out: list[tuple[str, float]] = []
    for name, value in row.items():
        if not above and name in _OWN:
            continue
        if isinstance(value, Mapping):
            out += _flat(value, f"{above}{name}.")
        elif (number := _number(value)) is not None:
            out.append((f"{above}{name}", number))
    return out


def _number(value: Any) -> float | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, (int, float)):
        try:
            return float(value)
        except OverflowError:
            return math.inf if value > 0 else -math.inf
    return _NOT_FINITE.get(value) if isinstance(value, str) else None
