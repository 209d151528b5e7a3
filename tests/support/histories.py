"""A run's history by recipe: what ranks did in each step, in milliseconds, becomes the files that agents write."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from allranks.perf.history import row_of_sample, row_of_step
from allranks.perf.values import PHASES, Sample, StepTimes


@dataclass
class Doing:
    """What one rank does in each step, in milliseconds; the exchange and the waiting follow from all ranks."""

    data: float = 1.0
    copy: float = 0.0
    forward: float = 6.0
    backward: float = 10.0  # compute, until the last gradient is there
    optimizer: float = 2.0
    python: float = 1.0
    log: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)
    cpu_share: float = 0.9
    queue_share: float = 0.0
    worker_busy: float = 0.0  # milliseconds of all loader workers in each step
    major_faults: int = 0  # in each step


EXCHANGE_MS = 2.0
"""What is not hidden behind the backward even if all ranks come at once."""


def write_history(
    run_dir: Path,
    ranks: list[Doing],
    *,
    steps: int = 400,
    exchange_ms: float = EXCHANGE_MS,
    nodes: int = 1,
    clock_ahead_s: float = 0.0,
    facts: dict[str, Any] | None = None,
    timed_every: int = 8,
    looks: Callable[[int, float], dict[str, Any]] | None = None,
) -> Path:
    """RUN/timeline/node<k>.jsonl for these ranks; gives `run_dir`.

    Args:
        nodes: Ranks are dealt out over so many hosts in blocks.
        clock_ahead_s: Of each node's clock before that of the node in front.
        facts: Of every node, over cores = 8.
        looks: What a node says of its host at a moment: (node, seconds since the first step) -> values.
    """
    folder = run_dir / "timeline"
    folder.mkdir(parents=True, exist_ok=True)
    per_node = -(-len(ranks) // nodes)
    timelines = _simulate(ranks, steps, exchange_ms / 1e3)
    for node in range(nodes):
        mine = list(range(node * per_node, min(len(ranks), (node + 1) * per_node)))
        ahead = node * clock_ahead_s
        lines = [_head(node, mine, len(ranks), {"cores": 8, **(facts or {})})]
        lines += [{"kind": "facts", "rank": r, "facts": ranks[r].facts} for r in mine if ranks[r].facts]
        samples = _samples(mine, ranks, timelines, ahead)
        lines += samples
        if looks is not None:
            lines += [{"kind": "host", "t": s["t"], **looks(node, s["t"] - ahead - 5.0)} for s in samples]
        for rank in mine:
            kept = [s for s in timelines[rank] if s.step % timed_every == 0 or s.step > steps - 16]
            rows = [row_of_step(_ahead(s, ahead)) for s in kept]
            lines.append({"kind": "steps", "rank": rank, "rows": rows})
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"node{node}.jsonl").write_text(text)
    return run_dir


def _head(node: int, mine: list[int], world_size: int, facts: dict[str, Any]) -> dict[str, Any]:
    return {
        "kind": "head",
        "format": 1,
        "node": node,
        "host": f"node{node}",
        "attempt": 0,
        "world_size": world_size,
        "unix_s": 1_800_000_000.0,
        "ranks": [{"rank": r, "pid": 1000 + r} for r in mine],
        "facts": facts,
    }


def _simulate(ranks: list[Doing], steps: int, exchange_s: float) -> list[list[StepTimes]]:
    """Everybody starts together at 5 s, and meets in each backward."""
    clocks, out = [5.0] * len(ranks), [[] for _ in ranks]
    for number in range(1, steps + 1):
        begun = []
        for clock, doing in zip(clocks, ranks, strict=True):
            data_to = clock + doing.data / 1e3
            forward = data_to + (doing.copy + doing.log) / 1e3
            forward_to = forward + doing.forward / 1e3
            backward = forward_to + doing.python / 1e3
            begun.append((clock, data_to, forward, forward_to, backward, backward + doing.backward / 1e3))
        met = max(times[-1] for times in begun) + exchange_s
        for i, (start, data_to, forward, forward_to, backward, ready) in enumerate(begun):
            clocks[i] = met + ranks[i].optimizer / 1e3
            out[i].append(
                StepTimes(
                    number,
                    start,
                    clocks[i],
                    data=(start, data_to),
                    forward=(forward, forward_to),
                    backward=(backward, met),
                    ready=ready,
                    optimizer=met,
                    copy_s=ranks[i].copy / 1e3,
                )
            )
    return out


def _ahead(step: StepTimes, by: float) -> StepTimes:
    def moved(span: tuple[float, float] | None) -> tuple[float, float] | None:
        return (span[0] + by, span[1] + by) if span else None

    return StepTimes(
        step.step,
        step.start + by,
        step.end + by,
        data=moved(step.data),
        forward=moved(step.forward),
        backward=moved(step.backward),
        ready=None if step.ready is None else step.ready + by,
        optimizer=None if step.optimizer is None else step.optimizer + by,
        copy_s=step.copy_s,
    )


def _samples(
    mine: list[int], ranks: list[Doing], timelines: list[list[StepTimes]], ahead: float
) -> list[dict[str, Any]]:
    out, last = [], timelines[mine[0]][-1].end
    moments = [5.0 + k for k in range(int(last - 5.0) + 1)] + [last]
    for t in moments:
        rows = [row_of_sample(r, _sample(ranks[r], timelines[r], t)) for r in mine]
        out.append({"kind": "sample", "t": round(t + ahead, 3), "rows": rows})
    return out


def _sample(doing: Doing, timeline: list[StepTimes], t: float) -> Sample:
    done = [s for s in timeline if s.end <= t + 1e-9]
    n = len(done)
    since = t - (done[-1].end if done else 5.0)
    exchanged = sum(s.exchange[1] - s.exchange[0] for s in done if s.exchange)
    phases = dict.fromkeys(PHASES, 0.0) | {
        "start": 0.5,
        "import": 3.0,
        "init": 1.0,
        "build": 0.5,
        "data": n * doing.data / 1e3 + since,
        "copy": n * doing.copy / 1e3,
        "log": n * doing.log / 1e3,
        "forward": n * doing.forward / 1e3,
        "backward": n * doing.backward / 1e3 + exchanged,
        "optimizer": n * doing.optimizer / 1e3,
        "python": n * doing.python / 1e3,
    }
    return Sample(
        t=t,
        step=n,
        phases=phases,
        exchanged_s=exchanged,
        exchanged_of_s=n * doing.backward / 1e3 + exchanged,
        epoch=n // 100,
        loss=2.0 / (1 + n / 50),
        cpu_s=4.0 + (t - 5.0) * doing.cpu_share,
        queue_s=(t - 5.0) * doing.queue_share,
        rss_mb=500.0,
        major_faults=n * doing.major_faults,
        drawn=n,
        busy_s=n * doing.worker_busy / 1e3,
        read=n,
    )
