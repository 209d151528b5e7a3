"""How does a program read a report? One JSON object; the keys are in docs/how-to/read-a-report.md."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from allranks.perf.breakdown import PARTS, RankParts
from allranks.perf.view import Cause
from allranks.report import plots, words
from allranks.report.making import Report, Times

SCHEMA = "allranks-report/1"


def as_json(report: Report) -> dict[str, Any]:
    """Everything, as values that JSON has: no NaN, no infinity."""
    facts = report.facts
    return plain(
        {
            "schema": SCHEMA,
            "run": {
                "path": str(facts.path),
                "trained": str(facts.trained),
                "name": facts.name,
                "command": facts.about.get("command"),
                "world_size": facts.world_size,
                "hosts": {str(rank): host for rank, host in facts.hosts.items()},
                "versions": facts.about.get("versions"),
                "job": facts.about.get("job"),
            },
            "end": {
                "state": facts.state,
                "exit_code": facts.exit_code,
                "why": facts.why,
                "started": facts.started,
                "ended": facts.ended,
                "last_sign": facts.last_sign,
                "wall_s": facts.wall_s,
            },
            "attempts": [
                {
                    "restart": a.restart,
                    "began": a.began,
                    "ended": a.ended,
                    "world_size": a.world_size,
                    "cause": a.code,
                }
                for a in facts.attempts
            ],
            "verdicts": [
                {
                    **told.verdict.to_json(),
                    "unix_time": told.unix_time,
                    "times": told.times,
                    "page": told.page,
                }
                for told in facts.verdicts
            ],
            "times": _times(report.times) if report.times else None,
            "metrics": _metrics(report),
            "checkpoints": [
                {"step": c.step, "folder": c.folder, "unix_time": c.unix_time, "size_bytes": c.size_bytes}
                for c in facts.checkpoints
            ],
            "missing": list(report.missing),
        }
    )


def _times(times: Times) -> dict[str, Any]:
    return {
        "attempt": times.history.attempt,
        "began": times.began,
        "steps": words.steps_done(times),
        "median_step_s": times.parts.median_step_s,
        "first_step_s": times.parts.first_step_s,
        "steps_per_s": words.mean_speed(times),
        "samples_per_s": words.samples_a_second(times),
        "parts": PARTS,
        "ranks": [_rank(rank) for rank in times.parts.ranks],
        "over_time": {str(rank): [_rank(piece) for piece in row] for rank, row in times.pieces.items()},
        "throughput": [{"t": t, "steps_per_s": speed} for t, speed in plots.speeds(times)],
        "came_last": came_last(times),
        "straggler": dataclasses.asdict(times.straggler) if times.straggler else None,
        "causes": [dataclasses.asdict(cause) for cause in times.causes],
        "remarks": [_remark(remark) for remark in times.remarks],
    }


def _rank(parts: RankParts) -> dict[str, Any]:
    return {
        "rank": parts.rank,
        "since": parts.since,
        "until": parts.until,
        "steps": parts.steps,
        "step_s": parts.step_s,
        "parts_s": {part: parts.per_step(part) for part in PARTS},
        "is_exchange_known": parts.is_exchange_known,
    }


def _remark(remark: Cause) -> dict[str, Any]:
    costs = ("costs_s", "share")
    return {key: value for key, value in dataclasses.asdict(remark).items() if key not in costs}


def came_last(times: Times) -> dict[str, int]:
    """At how many recorded meetings each rank came last."""
    counts: dict[int, int] = {rank.rank: 0 for rank in times.history.ranks}
    for meeting in times.parts.waits.gradients:
        counts[meeting.last] += 1
    return {str(rank): count for rank, count in counts.items()}


def _metrics(report: Report) -> dict[str, Any]:
    out = {}
    for name, series in report.facts.logged.series.items():
        best, bad = series.best(), series.first_not_finite
        out[name] = {
            "last": {"step": series.last.step, "value": series.last.value},
            "best": {"step": best.step, "value": best.value} if best else None,
            "best_is": series.direction or None,
            "first_not_finite": bad.step if bad else None,
            "points": [[p.step, p.value] for p in series.points],
        }
    return out


def plain(value: Any) -> Any:
    """NaN and infinity as strings, as metrics.jsonl has them."""
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return value
