"""What does a run leave? Run directories by recipe, for tests of what reads them."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from allranks.record.rundir import RunDir, create
from allranks.watch.verdict import Verdict
from support.histories import EXCHANGE_MS, Doing, write_history

BEGAN = 1_800_000_000.0
"""As the heads of support.histories have it."""
NAN_VERDICT = Verdict(
    code="AR730",
    name="not-finite",
    what="rank 1 on node0: the loss became nan first, at step 21",
    ranks=(1,),
    hosts=("node0",),
    where=("train.py:18:  loss = loss * torch.log(x)",),
    step=21,
    facts=("steps are counted from 1",),
    fix="look at this rank's batch",
)


def make_run(
    folder: Path,
    ranks: Sequence[Doing] = (Doing(), Doing()),
    *,
    steps: int = 120,
    nodes: int = 1,
    clock_ahead_s: float = 0.0,
    exchange_ms: float = EXCHANGE_MS,
    has_timeline: bool = True,
    about: Mapping[str, Any] | None = None,
    metrics: Sequence[Mapping[str, Any]] = (),
    verdicts: Sequence[Verdict] = (),
) -> RunDir:
    """A run of allranks run that ended well.

    Args:
        about: Over run.json's fields; None as a value takes the field away.
    """
    run = create(folder)
    per_node = -(-len(ranks) // nodes)
    hosts = [
        {
            "host": f"node{n}",
            "address": "",
            "ranks": list(range(n * per_node, min(len(ranks), (n + 1) * per_node))),
        }
        for n in range(nodes)
    ]
    fields = {
        "job": "abc",
        "command": ["/home/me/train.py", "--lr", "0.1"],
        "argv": ["run", "--nproc", str(per_node), "train.py", "--lr", "0.1"],
        "cwd": "/home/me",
        "host": socket.gethostname(),
        "versions": {"allranks": "0.1.0", "torch": "2.13.0", "python": "3.11.7"},
        "started_at": "2027-01-15T08:00:00+00:00",
        "world_size": len(ranks),
        "nodes": hosts,
        "restarts": 0,
        "exit_code": 0,
        "exit_codes": {str(r): 0 for r in range(len(ranks))},
        "ended_at": "2027-01-15T08:01:00+00:00",
        **(about or {}),
    }
    run.describe(**{name: value for name, value in fields.items() if value is not None})
    add_event(run, 0.0, "start", restart=0, world_size=len(ranks), nodes=hosts)
    if has_timeline:
        write_history(
            run.path,
            list(ranks),
            steps=steps,
            nodes=nodes,
            clock_ahead_s=clock_ahead_s,
            exchange_ms=exchange_ms,
        )
    if metrics:
        run.metrics.write_text("".join(json.dumps(row) + "\n" for row in metrics))
    for number, verdict in enumerate(verdicts, 1):
        add_event(run, 9.0 + number, "verdict", code=verdict.code, text=verdict.text())
        add_verdict(run, number, verdict)
    return run


def add_event(run: RunDir, after_s: float, kind: str, **fields: Any) -> None:
    """A line of events.jsonl, so long after the beginning."""
    with run.events.open("a") as file:
        file.write(json.dumps({"time": BEGAN + after_s, "event": kind, **fields}) + "\n")


def add_verdict(run: RunDir, number: int, verdict: Verdict) -> None:
    """diagnosis/00N-ARnnn.json and its page."""
    run.diagnosis.mkdir(exist_ok=True)
    stem = run.diagnosis / f"{number:03d}-{verdict.code}"
    stem.with_suffix(".json").write_text(
        json.dumps({"id": f"id{number}", **verdict.to_json(), "evidence": None})
    )
    stem.with_suffix(".md").write_text(verdict.markdown())
