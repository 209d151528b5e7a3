"""Cases of lost or mixed-up state that other trainings met (docs/cases-checkpoints.md): can they happen here? Those that need ranks."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import allranks
from allranks import ckpt
from allranks.core.errors import CheckpointError
from support.ranks import run_ranks

pytestmark = pytest.mark.ranks


class Numbered(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int, int]:
        return torch.full((4,), index / 48), index % 3, index


class Packer:
    """A reader that packs what it reads: each rank stands elsewhere."""

    def __init__(self, rank: int) -> None:
        self.cursor = 0
        self._pace = 2 + rank

    def read(self) -> None:
        self.cursor += self._pace

    def state_dict(self) -> dict[str, int]:
        return {"cursor": self.cursor}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.cursor = state["cursor"]


def train(
    run_dir: str | None, stop_at: int, num_workers: int = 0, clock_ahead_s: float = 0.0
) -> dict[str, Any]:
    """Train for some updates, save, and tell what this rank is then."""
    now = time.time
    with allranks.start(run_dir, global_batch_size=8, seed=3) as run:
        if run.rank == 1:
            time.time = lambda: now() + clock_ahead_s
        model = run.model(nn.Linear(4, 3))
        adam = run.optimizer(torch.optim.Adam(model.parameters(), lr=0.1))
        more = {"prefetch_factor": 2, "multiprocessing_context": "fork"} if num_workers else {}
        loader = run.loader(Numbered(), shuffle=True, num_workers=num_workers, **more)
        packer = Packer(run.rank)
        run.track(per_rank=True, packer=packer)
        found = run.resume()
        at_start, seen = packer.cursor, []
        for _ in run.epochs(2):
            for x, y, index in loader:
                run.step(F.cross_entropy(model(x), y))
                packer.read()
                seen.append(index.tolist())
                if run.updates == stop_at:
                    run.save(blocking=True)
                if run.updates > stop_at:
                    break
            break
        state = adam.state_dict()["state"]
        return {
            "run_dir": str(run.run_dir),
            "resumed": found is not None,
            "cursors": (at_start, packer.cursor),
            "steps": [int(entry["step"]) for entry in state.values()],
            "state": [entry["exp_avg_sq"].numpy().tobytes() for entry in state.values()],
            "weights": model.weight.detach().numpy().tobytes(),
            "seen": seen,
        }


def test_cases_c83_c92_when_ranks_resume_then_each_has_the_optimizers_state_and_its_own_cursor(
    tmp_path: Path,
) -> None:
    whole = run_ranks(2, train, str(tmp_path / "whole"), 5)
    run_ranks(2, train, str(tmp_path / "run"), 3)
    again = run_ranks(2, train, str(tmp_path / "run"), 5)
    assert all(row["resumed"] for row in again)
    # C83: only rank 0 had loaded Adam's state, and the ranks went apart in the first step.
    assert again[0]["steps"] == again[1]["steps"] == whole[0]["steps"]
    assert again[0]["state"] == again[1]["state"] == whole[0]["state"]
    assert again[0]["weights"] == again[1]["weights"] == whole[0]["weights"]
    # C92: rank 0's cursor had been restored on all.
    assert [row["cursors"][0] for row in again] == [6, 9]
    assert [row["cursors"][1] for row in again] == [row["cursors"][1] for row in whole]


def test_case_c88_when_clocks_of_ranks_differ_then_they_still_save_into_one_folder(tmp_path: Path) -> None:
    rows = run_ranks(2, train, None, 2, 0, 1.5, cwd=tmp_path)
    assert rows[0]["run_dir"] == rows[1]["run_dir"]
    (folder,) = Path(rows[0]["run_dir"]).glob("checkpoints/*")
    assert folder.name == "step-00000002", "named by the step, by rank 0, and by no clock"
    assert {"rank-0.pt", "rank-1.pt"} <= set(ckpt.load(folder).manifest.files)


def test_case_c91_when_workers_have_read_ahead_then_the_resumed_run_goes_on_after_the_last_trained_batch(
    tmp_path: Path,
) -> None:
    whole = run_ranks(1, train, str(tmp_path / "whole"), 5, 2)
    first = run_ranks(1, train, str(tmp_path / "run"), 2, 2)
    again = run_ranks(1, train, str(tmp_path / "run"), 5, 2)
    assert first[0]["seen"][:2] + again[0]["seen"] == whole[0]["seen"]


def test_case_c89_when_a_saved_generator_is_broken_then_the_resume_says_which_and_does_not_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = ckpt.random_states
    monkeypatch.setattr(ckpt, "random_states", lambda device: {**real(device), "torch": torch.zeros(3)})
    train(str(tmp_path / "run"), 2)
    with pytest.raises(CheckpointError, match=r"AR618 .*torch"):
        train(str(tmp_path / "run"), 4)
