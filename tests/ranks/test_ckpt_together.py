"""Do ranks that do not save together, or do not see one folder, say so instead of waiting for ever?"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import allranks
from allranks import ckpt
from allranks.core.errors import AllranksError
from allranks.train.saving import Left
from support.ranks import run_outcomes, run_ranks

pytestmark = pytest.mark.ranks
DATA = torch.utils.data.TensorDataset(torch.randn(4000, 2), torch.zeros(4000, dtype=torch.long))


def train(run: Any, after_step: Any = lambda run: None, **loader_settings: Any) -> None:
    model = run.model(nn.Linear(2, 2))
    run.optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    loader = run.loader(DATA, shuffle=True, **loader_settings)
    for _ in run.epochs(1):
        for x, y in loader:
            run.step(F.cross_entropy(model(x), y))
            after_step(run)


def save_on_rank_zero_only(run_dir: str) -> str:
    import allranks.train.saving as saving

    saving._ALL_CALL_WITHIN_S = 1.0
    try:
        with allranks.start(run_dir, global_batch_size=400) as run:
            train(run, lambda run: run.save() if run.is_rank_zero and run.updates == 3 else None)
    except AllranksError as error:
        Path(f"{run_dir}-{run.rank}").write_text(str(error))
    os._exit(3)  # as a script that fails would: what the others wait for closes with the process


def test_save_when_called_on_one_rank_names_the_others(tmp_path: Path) -> None:
    outcomes = run_outcomes(2, save_on_rank_zero_only, str(tmp_path / "run"), init=False)
    assert [o.exit_code for o in outcomes] == [3, 3]
    text = (tmp_path / "run-0").read_text()
    assert text.startswith("AR621 run.save on rank 0 after update 3") and "rank 1 did not come" in text
    assert "if run.is_rank_zero" in text


def save_to_a_disk_of_its_own(folder: str) -> str:
    try:
        with allranks.start(f"{folder}/run", global_batch_size=400) as run:
            run.save_every(target=f"{folder}/disk-of-{run.rank}/checkpoints")
            train(run)
    except AllranksError as error:
        return str(error)
    return "it went through"


def test_ranks_when_they_do_not_see_one_folder_are_named(tmp_path: Path) -> None:
    for text in run_ranks(3, save_to_a_disk_of_its_own, str(tmp_path)):
        assert text.startswith("AR610 rank 1 on ") and "rank 2 on" in text and "s3://" in text


def resume_what_is_damaged(run_dir: str) -> str:
    try:
        with allranks.start(run_dir, global_batch_size=400) as run:
            train(run)
    except AllranksError as error:
        return error.code
    return "it went through"


def test_error_of_rank_zero_while_resuming_is_every_ranks(tmp_path: Path) -> None:
    ckpt.save(tmp_path / "run" / "checkpoints", ckpt.Snapshot(step=1))
    (tmp_path / "run" / "checkpoints" / "step-00000001" / "training.pt").write_bytes(b"")
    assert run_ranks(2, resume_what_is_damaged, str(tmp_path / "run")) == ["AR600", "AR600"]


class Slow(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 4000

    def __getitem__(self, index: int) -> Any:
        return DATA[index]


def train_under_a_signal_to_the_group(run_dir: str) -> str:
    """The signal reaches the rank and its loader workers, as a scheduler's does."""
    torch.manual_seed(0)
    loader = torch.utils.data.DataLoader(
        Slow(), batch_size=4, shuffle=True, num_workers=2, multiprocessing_context="fork"
    )

    def after_step(run: Any) -> None:
        if run.updates == 5 and run.rank == 1:
            os.killpg(0, signal.SIGTERM)

    try:
        with allranks.start(run_dir) as run:
            run._pause._poll_s = 0.01
            model = run.model(nn.Linear(2, 2))
            run.optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
            batches = run.loader(loader)
            for _ in run.epochs(1):
                for x, y in batches:
                    run.step(F.cross_entropy(model(x), y))
                    after_step(run)
    except Left as left:
        return f"{run.updates} {left.reason}"
    return "it went through"


def test_signal_to_the_whole_process_group_with_loader_workers_still_saves(tmp_path: Path) -> None:
    """C94: the workers leave the signal to the rank."""
    zero, one = run_ranks(2, train_under_a_signal_to_the_group, str(tmp_path / "run"))
    assert zero == one and "SIGTERM at rank 1" in one
    found = ckpt.Checkpoints(tmp_path / "run" / "checkpoints").latest()
    assert found is not None and found.manifest.step == int(one.split()[0])
