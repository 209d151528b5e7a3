"""A training that can be killed at any moment; at its end each rank writes down all that it saw and has become.

python resume_job.py FOLDER NUM_UPDATES SAVE_STEPS, or train(folder, num_updates, save_steps) in a rank of support.ranks.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import allranks

BATCH, BATCHES = 8, 12


class Noisy(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return BATCH * BATCHES - 3

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int, int]:
        return torch.full((6,), index / 100) + torch.rand(6) * random.random(), index % 3, index


class History:
    """Losses and samples, hashed into one chain: the run's own record of what it saw."""

    def __init__(self) -> None:
        self.rows, self.chain = 0, ""

    def add(self, *seen: Any) -> None:
        self.rows += 1
        self.chain = hashlib.sha256(f"{self.chain} {seen!r}".encode()).hexdigest()

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows, "chain": self.chain}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rows, self.chain = state["rows"], state["chain"]


def digest(state: dict[str, Any]) -> str:
    hashed = hashlib.sha256()
    for name, value in sorted(state.items()):
        hashed.update(
            name.encode()
            + (value.numpy().tobytes() if isinstance(value, torch.Tensor) else repr(value).encode())
        )
    return hashed.hexdigest()


def train(folder: str, num_updates: int, save_steps: int, keep: int | None = 3) -> None:
    """FOLDER/run is the run directory, if no launcher names one; FOLDER/progress-RANK is "pid updates"; FOLDER/rankN.json the end."""
    torch.use_deterministic_algorithms(True)
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    note(place, 0)
    # Under a launcher the run directory is the launcher's.
    run_dir = None if "ALLRANKS_RUN_DIR" in os.environ else place / "run"
    with allranks.start(run_dir, global_batch_size=BATCH, seed=5) as run:
        model = run.model(
            nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 3))
        )
        adam = run.optimizer(torch.optim.Adam(model.parameters(), lr=0.01))
        run.scheduler(torch.optim.lr_scheduler.StepLR(adam, 20, 0.95))
        ema = run.ema(model, decay=0.95)
        loader = run.loader(Noisy(), shuffle=True, num_workers=0)
        history = History()
        run.track(per_rank=True, history=history)
        run.save_every(steps=save_steps, keep=keep)
        for epoch in run.epochs(num_updates // BATCHES):
            for x, y, index in loader:
                loss = F.cross_entropy(model(x), y)
                run.step(loss)
                history.add(epoch, loss.item().hex(), index.tolist())
                note(place, run.updates)
        end = {
            "updates": run.updates,
            "weights": digest(model.state_dict()),
            "average": digest(ema.module.state_dict()),
            "history": history.chain,
            "rows": history.rows,
            "random": torch.rand(1).item().hex(),
        }
        (place / f"rank{run.rank}.json").write_text(json.dumps(end))


def note(folder: Path, updates: int) -> None:
    """Say who this is and where it stands; a reader sees the old line or the new one."""
    place = folder / f"progress-{os.environ['RANK']}"
    place.with_suffix(".new").write_text(f"{os.getpid()} {updates}")
    place.with_suffix(".new").replace(place)


if __name__ == "__main__":
    train(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
