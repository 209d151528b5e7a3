"""Does a signal that reaches one rank, or only the launcher, save the run once and end all ranks after the same update?"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import allranks
from allranks import ckpt
from allranks.train.saving import Left
from support.ranks import run_ranks

pytestmark = pytest.mark.ranks


def train(run_dir: str, how: str | None, num_updates: int = 2000) -> dict[str, Any]:
    """Train until told to go; `how` says what tells which rank at update 5."""
    kind, _, who = (how or "").partition(" ")
    stop_file = Path(run_dir).parent / f"stop-{os.environ['RANK']}"
    os.environ["ALLRANKS_STOP_FILE"] = str(stop_file)
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(
        torch.randn(num_updates * 4, 2), torch.zeros(num_updates * 4, dtype=torch.long)
    )
    reason = None
    try:
        with allranks.start(run_dir, global_batch_size=4, seed=1) as run:
            run._pause._poll_s = 0.01
            model = run.model(nn.Linear(2, 2))
            run.optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
            loader = run.loader(data, shuffle=True)
            for _ in run.epochs(1):
                for x, y in loader:
                    run.step(F.cross_entropy(model(x), y))
                    if run.updates == 5 and how and str(run.rank) in who:
                        if kind == "file":
                            stop_file.write_text(json.dumps({"why": "SIGTERM"}))
                        else:
                            os.kill(os.getpid(), getattr(signal, kind))
    except Left as left:
        assert left.code == 0
        reason = left.reason
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    return {"updates": run.updates, "reason": reason, "weights": model.weight.detach().numpy().tobytes()}


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("SIGTERM 0", "SIGTERM at rank 0"),
        ("SIGTERM 1", "SIGTERM at rank 1"),
        ("SIGUSR1 01", "SIGUSR1 at rank"),
        ("file 1", "SIGTERM at the launcher"),
    ],
)
def test_ranks_when_one_is_told_to_go_save_after_the_same_update_and_go_on_later(
    how: str, told: str, tmp_path: Path
) -> None:
    run_dir = str(tmp_path / "run")
    rows = run_ranks(2, train, run_dir, how)
    assert rows[0]["updates"] == rows[1]["updates"] and 5 < rows[0]["updates"] < 2000
    assert all(row["reason"].startswith(told) for row in rows)
    found = ckpt.Checkpoints(f"{run_dir}/checkpoints").latest()
    assert found is not None and found.manifest.step == rows[0]["updates"] and not found.passed_over
    if how == "SIGTERM 1":
        again = run_ranks(2, train, run_dir, None)
        whole = run_ranks(2, train, str(tmp_path / "whole"), None)
        assert [r["weights"] for r in again] == [r["weights"] for r in whole]


def train_alone(run_dir: str, second_after_s: float) -> None:
    with allranks.start(run_dir) as run:
        model = run.model(nn.Linear(2, 2))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(second_after_s)  # the loop is busy with something else: no update comes
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)
        os._exit(7)


def test_second_signal_when_it_comes_later_ends_the_process_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from support.ranks import run_outcomes

    (ended,) = run_outcomes(1, train_alone, str(tmp_path / "run"), 2.3)
    assert ended.exit_code == 128 + signal.SIGTERM, ended.story()
    # One request that came twice, from the scheduler and from the launcher it told, is one request.
    (went_on,) = run_outcomes(1, train_alone, str(tmp_path / "run"), 0.1)
    assert went_on.exit_code == 7, went_on.story()
