"""Which settings are tried, in which order, and what do all rounds together say?"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from allranks.bench.stable import uncertainty
from allranks.bench.strategies import FOR_ONE
from allranks.bench.trial import Measured, Setting

Try = Callable[[Setting], Measured]


@dataclass(frozen=True, slots=True)
class Row:
    """One setting, over all rounds."""

    setting: Setting
    step_s: float = 0.0
    sure: float = 0.0  # relative half width of step_s
    apart: float = 0.0  # (slowest round - quickest) / step_s: how far rounds lie apart
    rounds: int = 0
    per_s: float = 0.0  # samples, or steps where no loader was seen
    efficiency: float | None = None  # per_s / (ranks x that of one rank)
    rss_mb: float = 0.0
    cuda_mb: float | None = None
    exchange_s: float | None = None
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """All rows, and what per_s counts."""

    rows: tuple[Row, ...]
    unit: str  # "samples" or "steps"


def settings_of(ranks: Sequence[int], strategies: Sequence[str]) -> list[Setting]:
    """Every number of ranks with every strategy; one rank has nothing to exchange, and DataParallel is one process."""
    found = [Setting(1)] if 1 in ranks else []
    for number in ranks:
        found += [Setting(number, s) for s in strategies if number > 1 and s != "dataparallel"]
    if "dataparallel" in strategies:
        found.append(Setting(1, "dataparallel"))
    assert all(s.ranks > 1 or s.strategy in FOR_ONE for s in found)
    return found


def doublings(most: int) -> list[int]:
    """1, 2, 4 ... and `most`."""
    found = [1]
    while found[-1] * 2 <= most:
        found.append(found[-1] * 2)
    return found if found[-1] == most else [*found, most]


def measure(settings: Sequence[Setting], rounds: int, try_once: Try, say: Callable[[str], None]) -> Answer:
    """Try every setting once a round, in another order each time; one that failed is not tried again."""
    found: dict[Setting, list[Measured]] = {setting: [] for setting in settings}
    for number in range(rounds):
        for setting in random.Random(number).sample(list(settings), len(settings)):
            if any(m.failure for m in found[setting]):
                continue
            measured = try_once(setting)
            found[setting].append(measured)
            first = (
                measured.failure.splitlines()[0]
                if measured.failure
                else f"{measured.step_s * 1e3:.3g} ms a step"
            )
            say(f"round {number + 1} of {rounds}: {setting}: {first}")
    return conclude(found)


def conclude(found: dict[Setting, list[Measured]]) -> Answer:
    """The rows of what was measured."""
    good = [m for several in found.values() for m in several if not m.failure]
    unit = "samples" if good and all(m.samples_per_step for m in good) else "steps"
    rows = [_row(setting, several, unit) for setting, several in found.items()]
    one = next((row for row in rows if row.setting == Setting(1) and not row.failure), None)
    return Answer(tuple(_with_efficiency(row, one, unit) for row in rows), unit)


def _row(setting: Setting, several: Sequence[Measured], unit: str) -> Row:
    failed = next((m for m in several if m.failure), None)
    good = [m for m in several if not m.failure]
    if failed is not None or not good:
        return Row(setting, failure=failed.failure if failed else "not tried")
    steps = [m.step_s for m in good]
    step_s = median(steps)
    per_step = median([m.samples_per_step or 0.0 for m in good]) if unit == "samples" else 1.0
    return Row(
        setting,
        step_s=step_s,
        sure=uncertainty([block for m in good for block in m.blocks]),
        apart=(max(steps) - min(steps)) / step_s,
        rounds=len(good),
        per_s=per_step / step_s,
        rss_mb=max(m.rss_mb for m in good),
        cuda_mb=_middle(m.cuda_mb for m in good),
        exchange_s=_middle(m.exchange_s for m in good),
    )


def _middle(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _with_efficiency(row: Row, one: Row | None, unit: str) -> Row:
    if row.failure or one is None or unit != "samples":
        return row
    return replace(row, efficiency=row.per_s / (row.setting.ranks * one.per_s))
