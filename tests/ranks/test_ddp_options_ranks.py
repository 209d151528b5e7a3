"""Do ranks change DDP's options together after the first updates, with the bits of a training that never changed them?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import allranks
from allranks.wrap import options
from support.ranks import run_ranks

pytestmark = pytest.mark.ranks


def train(folder: str, bucket_cap_mb: float | None) -> tuple[list[torch.Tensor], str]:
    """Twelve updates of a model of several buckets; a bucket more is said to be dear, so that one is chosen."""
    options.CALL_NS = 10**12
    torch.manual_seed(0)
    with allranks.start(folder) as run:
        module = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(300, 300), nn.ReLU())))
        model = run.model(module, bucket_cap_mb=bucket_cap_mb)
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        generator = torch.Generator().manual_seed(run.rank)
        for _ in range(12):
            run.step(model(torch.randn(4, 300, generator=generator)).square().mean())
        return [p.detach().clone() for p in model.parameters()], run.explain()


def compare(folder: str) -> tuple[str, str]:
    chosen, said = train(folder + "/chosen", None)
    given, said_of_given = train(folder + "/given", 0.5)
    assert all(torch.equal(a, b) for a, b in zip(chosen, given, strict=True))
    return said, said_of_given


def test_options_when_one_bucket_is_better_then_changed_on_all_ranks_with_the_same_bits(
    tmp_path: Path,
) -> None:
    said = run_ranks(2, compare, str(tmp_path), init=False)
    assert said[0] == said[1]
    chosen, given = said[0]
    assert "bucket_cap_mb=2." in chosen and "one bucket" in chosen and "static_graph=False" in chosen
    assert "bucket_cap_mb=0.5: given" in given
    events = [json.loads(line) for line in (tmp_path / "chosen" / "events.jsonl").read_text().splitlines()]
    told = [e for e in events if "bucket_cap_mb" in str(e)]
    assert len(told) == 1 and "bucket_cap_mb" in str(told[0]["changed"])
