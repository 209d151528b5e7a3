"""How many threads does a real rank compute with, and does it say so? (The arithmetic: tests/unit/test_cores.py.)"""

from __future__ import annotations

import pytest
import torch

import allranks
from allranks.core.cores import usable_cores
from support.ranks import run_outcomes

pytestmark = pytest.mark.ranks


def threads_of(asked: int | None) -> int:
    with allranks.start(threads=asked):
        return torch.get_num_threads()


@pytest.mark.parametrize(
    ("env", "asked", "expected"),
    [
        ({"OMP_NUM_THREADS": "1"}, None, None),  # torchrun's trap
        ({"OMP_NUM_THREADS": "3"}, None, 3),  # the user's own
        ({"OMP_NUM_THREADS": "1"}, 2, 2),
        ({"OMP_NUM_THREADS": "5", "ALLRANKS_OMP": "agent", "ALLRANKS_JOB": "x"}, None, None),
    ],
)
def test_threads_then_a_fair_share_or_the_users_number(
    env: dict[str, str], asked: int | None, expected: int | None
) -> None:
    outcomes = run_outcomes(2, threads_of, asked, init=False, env=env)
    share = max(1, usable_cores() // 2)
    for outcome in outcomes:
        assert outcome.result == (expected or share), outcome.story()
    assert f"{expected or share} intra-op thread" in outcomes[0].output
