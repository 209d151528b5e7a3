"""How are the conclusions said? Sentences and numbers that the terminal, the page and JSON share."""

from __future__ import annotations

import math
import time

from allranks.perf.breakdown import PARTS
from allranks.perf.causes import MIN_STEPS
from allranks.report.facts import Facts, exit_text
from allranks.report.making import Report, Times
from allranks.report.moments import seconds_short
from allranks.watch.verdict import seconds

STATES = {
    "running": "goes on",
    "ended": "ended with exit code 0",
    "failed": "failed",
    "killed": "was killed",
    "unknown": "end not recorded",
}


def state_text(facts: Facts) -> str:
    """How it stands: 'failed with exit code 137 (SIGKILL)'."""
    text = STATES[facts.state]
    if facts.state == "failed" and facts.exit_code is not None:
        text += f" with {exit_text(facts.exit_code)}"
    return text


def ending_text(facts: Facts) -> str:
    """The state, when and why."""
    text = state_text(facts)
    if facts.wall_s is not None:
        verb = "so far" if facts.state == "running" else "in all"
        text += f", {length(facts.wall_s)} {verb}"
    if len(facts.attempts) > 1:
        text += f", {len(facts.attempts)} attempts"
    return text + (f": {facts.why}" if facts.why and not facts.why.startswith("exit code") else "")


def about_text(facts: Facts) -> str:
    """'2 ranks on vm, torch 2.13.0'."""
    out = []
    if facts.world_size:
        out.append(f"{facts.world_size} rank{'s' * (facts.world_size > 1)}")
    hosts = sorted(set(facts.hosts.values()))
    if hosts:
        out.append("on " + (hosts[0] if len(hosts) == 1 else f"{len(hosts)} hosts ({', '.join(hosts[:4])})"))
    versions = facts.about.get("versions")
    if isinstance(versions, dict):
        out.append(", ".join(f"{name} {value}" for name, value in versions.items()))
    return " ".join(out[:2]) + (" \u00b7 " if out[:2] and out[2:] else "") + " ".join(out[2:])


def when_text(unix_time: float | None) -> str:
    """Local date and time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_time)) if unix_time else "-"


def length(value: float) -> str:
    """A span of time, coarse."""
    return seconds(value)


def steps_done(times: Times) -> int:
    """Optimizer steps that every rank has ended."""
    return min((r.samples[-1].step for r in times.history.ranks if r.samples), default=0)


def mean_speed(times: Times) -> float | None:
    """Steps a second over all that is known, the first step left out."""
    rows = [r for r in times.parts.ranks if r.steps and r.until > r.since]
    return min((r.steps / (r.until - r.since) for r in rows), default=None)


def samples_a_second(times: Times) -> float | None:
    """Trained on by all ranks together, by the batches they drew; None where the batch size of a rank's loader is not known."""
    total = 0.0
    for parts in times.parts.ranks:
        rank = times.history.rank(parts.rank)
        size = int(rank.facts.get("loader_batch", 0)) if rank else 0
        seen = [s for s in rank.samples if parts.since <= s.t <= parts.until] if rank else []
        if size <= 0 or len(seen) < 2 or seen[-1].drawn <= seen[0].drawn:
            return None
        trained = float(rank.facts.get("loader_share", 1.0)) if rank else 1.0  # the others are evaluated
        total += trained * size * (seen[-1].drawn - seen[0].drawn) / (seen[-1].t - seen[0].t)
    return total or None


def speed_text(times: Times) -> str:
    """'81.2 steps a second, 5,200 samples'."""
    steps, samples = mean_speed(times), samples_a_second(times)
    if not steps:
        return ""
    return f"{steps:.3g} steps a second" + (f", {samples:,.0f} samples a second" if samples else "")


def first_step_text(times: Times) -> str:
    """That the first step took long, and is in none of the figures; "" where it was as the others."""
    first = times.parts.first_step_s
    if first <= 3 * times.parts.median_step_s:
        return ""
    return f"the first step took {seconds_short(first)} (compiling, allocating, starting loader workers); it is not counted"


def largest_text(times: Times) -> str:
    """'backward compute 54 %, forward 21 %, data wait 9 %'."""
    return ", ".join(f"{PARTS[part]} {share:.0%}" for part, share in times.parts.largest(3))


STARTING = {"import": "imports", "init": "joining the ranks", "build": "building and copying the model"}


def starting_text(times: Times) -> str:
    """'before the first step: imports 10 s, joining the ranks 0.4 s ... (rank 3)', of the rank that took longest."""
    spent = {}
    for rank in times.history.ranks:
        if rank.samples:
            phases = rank.samples[-1].phases
            spent[rank.rank] = {name: phases.get(phase, 0.0) for phase, name in STARTING.items()}
    if not spent:
        return ""
    slowest = max(spent, key=lambda rank: sum(spent[rank].values()))
    told = [f"{name} {seconds(value)}" for name, value in spent[slowest].items() if value >= 0.05]
    return f"before the first step: {', '.join(told)} (rank {slowest}, the slowest)" if told else ""


def straggler_text(times: Times) -> str:
    """Which rank the others wait for, how long and why, if no cause says so; or that there is none."""
    one = times.straggler
    steps = min((r.steps for r in times.parts.ranks), default=0)
    if steps < MIN_STEPS or any(cause.code == "AR800" for cause in times.causes):
        return ""
    if one is None:
        known = [r for r in times.parts.ranks if r.steps and r.is_exchange_known]
        if len(times.history.ranks) < 2 or not known:
            return ""
        return "no straggler: no rank is waited for by all others in most steps"
    host = f" on {one.host}" if one.host else ""
    caused = f", {one.caused:.0%} of all waiting is for it" if one.caused else ""
    return (
        f"rank {one.rank}{host} is the straggler: the others wait {seconds_short(one.excess_s)} a step for it"
        f" ({one.share:.0%} of the step){caused}; {one.why}"
    )


def step_text(times: Times) -> str:
    """The median step."""
    return seconds_short(times.parts.median_step_s)


def value_text(value: float) -> str:
    """A logged number."""
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:.4g}"


def size_text(size: int | None) -> str:
    """'1.2 MB'."""
    if size is None:
        return "-"
    value = float(size)
    for unit in ("bytes", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"


def metric_rows(report: Report) -> list[tuple[str, str, str, str]]:
    """(name, last, best, direction) of each logged value."""
    rows = []
    for series in report.facts.logged.series.values():
        best = series.best()
        last = f"{value_text(series.last.value)} at step {series.last.step:,}"
        told = f"{value_text(best.value)} at step {best.step:,} ({series.direction})" if best else "-"
        bad = series.first_not_finite
        rows.append((series.name, last, told, f"first not finite at step {bad.step:,}" if bad else ""))
    return rows
