"""Does each strategy of `allranks bench` change how a script with run.model sends its gradients?"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import allranks
from allranks.bench import strategies
from support.ranks import run_ranks

pytestmark = pytest.mark.ranks


def way_of(folder: str, strategy: str) -> tuple[str, bool]:
    strategies.apply(strategy)
    with allranks.start(folder) as run:
        model = run.model(nn.Linear(4, 2), sync_every=4, outer_optimizer="nesterov")
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        run.step(model(torch.ones(3, 4)).sum())
        return model.exchange.name if model.exchange is not None else model._way, model.is_apart


@pytest.mark.parametrize(
    ("strategy", "way"), [("memory", "memory"), ("ddp", "group"), ("bf16", "bf16"), ("powersgd", "powersgd")]
)
def test_strategy_when_script_uses_run_model_then_gradients_go_that_way(
    strategy: str, way: str, tmp_path: Path
) -> None:
    assert run_ranks(2, way_of, str(tmp_path), strategy, init=False) == [(way, False)] * 2
