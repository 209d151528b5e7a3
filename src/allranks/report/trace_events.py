"""How does a run look in Perfetto? A Trace Event Format file: a process per rank, all ranks on one clock.

    rank k   main          each recorded step, and its parts inside it
             collectives   calls of collectives, and the gradient exchange of DDP, with arrows between ranks of one meeting
             loader        how many loader workers were busy, as a counter; processor and memory beside it
    job      verdicts and checkpoints, as instants

Source: the format's document, "Trace Event Format" (Google, 2016): ts and dur in microseconds, ph X, M, C, i, s, f.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from allranks.perf.breakdown import PARTS
from allranks.perf.values import CallTimes, History, RankHistory, Sample
from allranks.report.making import Report
from allranks.report.moments import BETWEEN, NAMES, StepMoments, moments_of

MAIN, COLLECTIVES, LOADER = 1, 2, 3
JOB = 1_000_000
"""The process of what is no rank's; pids of ranks are their numbers."""
MOST_STEPS = 40_000
"""Of all ranks together: some 50 MB of events. Perfetto opens no more in good time."""
MOST_CALLS = 20_000
Event = dict[str, Any]


def as_trace(report: Report) -> dict[str, Any]:
    """The whole file; without times only verdicts and checkpoints are in it."""
    history = report.times.history if report.times else None
    events = list(_names(history)) if history else []
    left_out = ""
    if history:
        every = max(1, -(-sum(len(rank.steps) for rank in history.ranks) // MOST_STEPS))
        left_out = f"of the recorded steps every {every}th is here" if every > 1 else ""
        shared = set(history.shared_steps()[::-1][::every])
        for rank in history.ranks:
            events += _steps(rank, shared, every)
            events += _calls(rank.rank, rank.calls[-MOST_CALLS:], rank.samples[-1].t if rank.samples else 0.0)
            events += _counters(rank)
        for step in moments_of(history, shared):
            events += _step_of_all(step)
        events += _arrows_of_calls(history)
    events += _instants(report)
    return {
        "traceEvents": sorted(events, key=lambda e: (e["ph"] != "M", e.get("ts", 0.0))),
        "displayTimeUnit": "ms",
        "otherData": {
            "run": str(report.facts.path),
            "name": report.facts.name,
            "missing": [*report.missing, *filter(None, [left_out])],
        },
    }


def us(t: float) -> float:
    """Seconds of the attempt in the file's unit."""
    return round(t * 1e6, 3)


def _names(history: History) -> Iterator[Event]:
    for rank in history.ranks:
        pid = rank.rank
        yield _meta(pid, "process_name", name=f"rank {rank.rank}")
        yield _meta(pid, "process_labels", labels=rank.host)
        yield _meta(pid, "process_sort_index", sort_index=rank.rank)
        for tid, name in ((MAIN, "main"), (COLLECTIVES, "collectives"), (LOADER, "loader workers")):
            yield _meta(pid, "thread_name", tid, name=name)
            yield _meta(pid, "thread_sort_index", tid, sort_index=tid)
    yield _meta(JOB, "process_name", name="job")
    yield _meta(JOB, "process_sort_index", sort_index=-1)


def _meta(pid: int, what: str, tid: int = 0, **args: Any) -> Event:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "ts": 0, "args": args}


def _slice(pid: int, tid: int, name: str, kind: str, begin: float, end: float, **args: Any) -> Event:
    found = {"ph": "X", "name": name, "cat": kind, "pid": pid, "tid": tid, "ts": us(begin)}
    return {**found, "dur": max(0.0, round(us(end) - us(begin), 3)), "args": args}


def _steps(rank: RankHistory, shared: set[int], every: int) -> Iterator[Event]:
    """Each recorded step; its parts come from _step_of_all where all ranks recorded it."""
    for step in [s for s in rank.steps if s.step in shared or every == 1]:
        yield _slice(rank.rank, MAIN, f"step {step.step}", "step", step.start, step.end, step=step.step)
        if step.step not in shared:
            spans = {"data": step.data, "forward": step.forward, "backward": step.backward}
            for part, span in spans.items():
                if span:
                    yield _slice(rank.rank, MAIN, PARTS[part], part, *_inside(span, step.start, step.end))
            if step.optimizer is not None:
                span = _inside((step.optimizer, step.end), step.start, step.end)
                yield _slice(rank.rank, MAIN, PARTS["optimizer"], "optimizer", *span)


def _inside(span: tuple[float, float], begin: float, end: float) -> tuple[float, float]:
    return min(max(span[0], begin), end), min(max(span[1], begin), end)


def _step_of_all(step: StepMoments) -> Iterator[Event]:
    """The parts of a step on every rank, and the gradient exchange with arrows from those who waited to who came last."""
    for rank in step.ranks:
        for one in rank.segments:
            if one.part != BETWEEN:
                yield _slice(rank.rank, MAIN, NAMES[one.part], one.part, one.begin, one.end)
        if rank.exchange is not None:
            begin, end = rank.exchange
            # Not of no length: an arrow needs something to end on.
            end = max(end, begin + 1e-6)
            yield _slice(rank.rank, COLLECTIVES, "gradient exchange", "exchange", begin, end, step=step.step)
    if step.last is not None:
        came = {r.rank: r.ready for r in step.ranks if r.ready is not None}
        yield from _arrows(f"gradients of step {step.step}", f"g{step.step}", came)


def _arrows(name: str, key: str, came: dict[int, float]) -> Iterator[Event]:
    """From each rank that waited to the one that came last, where they entered: an arrow cannot go back in time."""
    last = max(came, key=lambda rank: came[rank])
    for rank, at in came.items():
        if rank != last:
            flow = {"cat": "meeting", "name": name, "id": f"{key}-{rank}", "tid": COLLECTIVES}
            yield {"ph": "s", "pid": rank, "ts": us(at), **flow}
            yield {"ph": "f", "bp": "e", "pid": last, "ts": us(came[last]), **flow}


def _calls(rank: int, calls: Sequence[CallTimes], until: float) -> Iterator[Event]:
    """The script's own collectives; one that did not come back lasts as long as anything is known."""
    for call in calls:
        end = max(call.exited if call.exited is not None else until, call.entered + 1e-6)
        args = {"group": call.group, "seq": call.seq, "bytes": call.bytes, "line": call.line}
        if call.exited is None:
            args["note"] = "it did not come back"
        yield _slice(rank, COLLECTIVES, call.op, "collective", call.entered, end, **args)


def _arrows_of_calls(history: History) -> Iterator[Event]:
    meetings: dict[tuple[str, int, str], dict[int, float]] = {}
    for rank in history.ranks:
        for call in rank.calls[-MOST_CALLS:]:
            if call.seq >= 0:
                meetings.setdefault((call.group, call.seq, call.op), {})[rank.rank] = call.entered
    for (group, seq, op), came in meetings.items():
        if len(came) > 1:
            yield from _arrows(op, f"c{group}-{seq}-{op}", came)


def _counters(rank: RankHistory) -> Iterator[Event]:
    """What a sample counts, as a rate between two of them."""
    for before, after in pairwise(rank.samples):
        took = after.t - before.t
        if took <= 0:
            continue
        yield from _counter(rank.rank, before.t, "processors used", (after.cpu_s - before.cpu_s) / took)
        yield from _counter(rank.rank, before.t, "steps a second", (after.step - before.step) / took)
        yield from _counter(rank.rank, before.t, "memory (MB)", before.rss_mb)
        if after.read or after.busy_s:
            yield from _counter(rank.rank, before.t, "loader workers busy", _busy(before, after) / took)


def _busy(before: Sample, after: Sample) -> float:
    return max(0.0, after.busy_s - before.busy_s)


def _counter(pid: int, t: float, name: str, value: float) -> Iterator[Event]:
    yield {
        "ph": "C",
        "name": name,
        "pid": pid,
        "tid": LOADER,
        "ts": us(t),
        "args": {"value": round(value, 4)},
    }


def _instants(report: Report) -> Iterator[Event]:
    """Verdicts and checkpoints on the clock of the attempt; of a run without times since its start."""
    began = report.times.began if report.times else report.facts.started or 0.0
    marks = [(t.unix_time, t.verdict.head()) for t in report.facts.verdicts]
    marks += [(c.unix_time, f"checkpoint of step {c.step}") for c in report.facts.checkpoints]
    for when, name in marks:
        if when is not None and when >= began:
            yield {
                "ph": "i",
                "s": "g",
                "name": name,
                "cat": "job",
                "pid": JOB,
                "tid": 0,
                "ts": us(when - began),
            }
