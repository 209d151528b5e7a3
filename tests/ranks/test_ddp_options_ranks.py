"""Do ranks change DDP's options together after the first updates, with the bits of a training that never changed them?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import allranks
from allranks.wrap import options
from ranks.test_sending import on_hosts
from support.ranks import run_ranks

pytestmark = pytest.mark.ranks


def train(folder: str, bucket_cap_mb: float | None, **how: Any) -> tuple[list[torch.Tensor], str]:
    """Twelve updates of a model of several buckets; calls and exposed communication are said to be dear, so that others are chosen."""
    options.CALL_NS, options.EXPOSED, options.MIN_BYTES = 10**12, -1.0, 0
    torch.manual_seed(0)
    with allranks.start(folder) as run:
        layers = [
            nn.Linear(300, 300),
            nn.ReLU(),
            nn.Linear(300, 1200),
            nn.ReLU(),
            nn.Linear(1200, 30),
        ]
        model = run.model(nn.Sequential(*layers), bucket_cap_mb=bucket_cap_mb, **how)
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        generator = torch.Generator().manual_seed(run.rank)
        for _ in range(12):
            run.step(model(torch.randn(4, 300, generator=generator)).square().mean())
        return [p.detach().clone() for p in model.parameters()], run.explain()


def compare(folder: str, places: str, how: dict[str, Any]) -> tuple[str, str]:
    if places:
        on_hosts(places)
    chosen, said = train(folder + "/chosen", None, **how)
    given, said_of_given = train(folder + "/given", 0.5, **how)
    assert all(torch.equal(a, b) for a, b in zip(chosen, given, strict=True))
    return said, said_of_given


@pytest.mark.parametrize(
    ("places", "how", "reason"),
    [
        ("aa", {}, "one bucket"),
        ("aab", {}, "one bucket"),
        ("ab", {"compress": "powersgd"}, "one bucket"),
        ("ab", {"compress": "bf16"}, "smaller ones are sent earlier"),
        ("ab", {}, "smaller ones are sent earlier"),
        ("ab", {"compress": "auto", "accuracy": "lossless"}, "smaller ones are sent earlier"),
    ],
)
def test_options_when_others_are_better_then_changed_on_all_ranks_with_the_same_bits(
    places: str, how: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    said = run_ranks(len(places), compare, str(tmp_path), places, how)
    assert len(set(said)) == 1
    chosen, given = said[0]
    assert "bucket_cap_mb=" in chosen and reason in chosen and "static_graph=False" in chosen
    assert "bucket_cap_mb=0.5: given" in given
    events = [json.loads(line) for line in (tmp_path / "chosen" / "events.jsonl").read_text().splitlines()]
    told = [e for e in events if "bucket_cap_mb" in str(e)]
    assert len(told) == 1 and "bucket_cap_mb" in str(told[0]["changed"])


def explained(folder: str, how: dict[str, Any]) -> str:
    return train(folder, None, **how)[1]


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({"sync_every": 3}, "sync_every sends weights"),
        ({"compress": "auto", "accuracy": "any", "shared_memory": False}, "compress='auto'"),
    ],
)
def test_explain_when_buckets_do_not_count_then_says_why(
    how: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    said = run_ranks(2, explained, str(tmp_path), how, init=False)
    assert (
        len(set(said)) == 1 and reason in said[0] and "broadcast_buffers=False: the model has none" in said[0]
    )
