"""How does a test decide on what ranks noted? Made-up evidence of a job on one host."""

from __future__ import annotations

from typing import Any

from allranks.watch.decide import decide, decide_all
from allranks.watch.evidence import Evidence, Model, Rank, Record
from allranks.watch.verdict import Verdict

Notes = list[dict[str, Any]]
LINE = "/home/ann/train.py:27 main"
MODEL = Model(1, parameters=("0.weight float32 [4, 4] frozen", "2.weight float32 [4, 4] trained"))


def evidence(*noted: Notes, trigger: str = "notes", **record: Any) -> Evidence:
    ranks = tuple(
        Rank(
            n,
            "gpu-a",
            pid=100 + n,
            state="R",
            record=Record(step=40, model=MODEL, noted=tuple(own), **record),
        )
        for n, own in enumerate(noted)
    )
    return Evidence(len(noted), ranks, trigger=trigger)


def codes(*noted: Notes) -> list[str]:
    return [v.code for v in decide_all(evidence(*noted))]


def said(*noted: Notes) -> Verdict:
    verdict = decide(evidence(*noted))
    assert verdict is not None
    return verdict
