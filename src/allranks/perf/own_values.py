"""Which numbers that one rank logs are its own, and not the job's? A remark at the end of a run and in its report, no alarm.

What ranks note of their loggers (record/logged.py) comes here as facts of the timeline. A number is remarked on where one rank alone logs
that name, and the ranks' losses differ: of ranks that compute the same, one speaks for all.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from allranks.perf.values import History
from allranks.perf.view import Cause

CODE, NAME = "AR726", "own-value-logged"
DIFFERS = 1e-4
"""Of the loss: less is rounding."""
SHOWN = 3


def facts_of(noted: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What a rank noted of its loggers, and of a few losses, as facts of the timeline."""
    found: dict[str, Any] = {}
    for note in noted:
        kind = note.get("kind")
        if kind == "logs":
            found.setdefault("logs", []).append(str(note["name"]))
        elif kind == "logged":
            found.setdefault("logged", []).append({k: v for k, v in note.items() if k != "kind"})
        elif kind == "loss":
            found.setdefault("losses", []).append([note["step"], note["value"]])
    return found


def find_remarks(history: History) -> list[Cause]:
    """One for each rank that logs its own numbers alone."""
    if history.world_size < 2 or len(history.ranks) != history.world_size:
        return []
    told = _losses_differ(history)
    found = []
    for rank in history.ranks:
        others = {_alike(n) for r in history.ranks if r is not rank for n in r.facts.get("logs", ())}
        own = [v for v in rank.facts.get("logged", ()) if _alike(v["name"]) not in others]
        own = [v for v in own if v.get("how") == "evaluation" or told]
        if own:
            found.append(_remark(rank.rank, history.world_size, own, told))
    return found


def _alike(name: str) -> str:
    """'loss/rank0' is 'loss/rank1' of another rank."""
    return re.sub(r"\d+", "0", name)


def _remark(rank: int, world: int, own: list[dict[str, Any]], told: str) -> Cause:
    names = ", ".join(str(v["name"]) for v in own[:SHOWN]) + (
        f" and {len(own) - SHOWN} more" if len(own) > SHOWN else ""
    )
    has_losses = any(v["how"] != "evaluation" for v in own)
    facts = [_fact(v, rank) for v in own[:SHOWN]]
    if has_losses:
        facts.append(told)
    return Cause(
        CODE,
        NAME,
        f"likely: {names}: logged by rank {rank} alone, and rank {rank}'s own: covers 1/{world} of the data",
        "bring it together on all ranks before one logs it (dist.all_reduce of the loss, or of sums and counts; with allranks "
        "run.log(loss=run.mean(loss))), or name it as one rank's",
        (rank,),
        0.0,
        0.0,
        tuple(facts),
    )


def _fact(value: Mapping[str, Any], rank: int) -> str:
    line = str(value.get("line", "")).rpartition("/")[2] or "a line that is not known"
    where = f"{value['name']}: {value.get('call', 'logged')} at {line}"
    if value["how"] == "evaluation":
        return (
            f"{where}, after the evaluation at {str(value.get('loop', '')).rpartition('/')[2]}, in which rank {rank} has "
            f"{value['share']} of {value['length']} samples; no collective was called since its first batch"
        )
    mean = "a mean of the losses" if value["how"] == "mean" else "the loss"
    scale = value.get("scale", 1.0)
    times = "" if abs(scale - 1.0) < 1e-3 else f", times {scale:.6g}"
    return f"{where}, {value['value']:.6g} in step {value['step']}: {mean} that backward was called on there{times}"


def _losses_differ(history: History) -> str:
    """'in step 9 the loss was 0.5 on rank 0 and 0.61 on rank 1'; empty if no step shows that it differs."""
    first: dict[int, tuple[int, float]] = {}
    for rank in history.ranks:
        for step, own in rank.facts.get("losses", ()):
            other, loss = first.setdefault(step, (rank.rank, own))
            if abs(loss - own) > DIFFERS * max(abs(loss), abs(own)):
                return f"in step {step} the loss was {loss:.4g} on rank {other} and {own:.4g} on rank {rank.rank}"
    return ""
