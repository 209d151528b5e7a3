"""A training that can be killed at any moment; at its end each rank writes down all that it saw and has become.

resume_job.py RESULT_FOLDER NUM_UPDATES SAVE_STEPS
"""

from __future__ import annotations

import hashlib
import json
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
    """Losses and samples, as the run's own record of what it saw."""

    def __init__(self) -> None:
        self.rows: list[Any] = []

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rows = list(state["rows"])


def digest(state: dict[str, Any]) -> str:
    hashed = hashlib.sha256()
    for name, value in sorted(state.items()):
        hashed.update(
            name.encode()
            + (value.numpy().tobytes() if isinstance(value, torch.Tensor) else repr(value).encode())
        )
    return hashed.hexdigest()


def main(result: str, num_updates: int, save_steps: int) -> None:
    torch.use_deterministic_algorithms(True)
    Path(result).mkdir(parents=True, exist_ok=True)
    with allranks.start(global_batch_size=BATCH, seed=5) as run:
        model = run.model(
            nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 3))
        )
        adam = run.optimizer(torch.optim.Adam(model.parameters(), lr=0.01))
        run.scheduler(torch.optim.lr_scheduler.StepLR(adam, 20, 0.95))
        ema = run.ema(model, decay=0.95)
        loader = run.loader(Noisy(), shuffle=True, num_workers=0)
        history = History()
        run.track(per_rank=True, history=history)
        run.save_every(steps=save_steps)
        for epoch in run.epochs(num_updates // BATCHES):
            for x, y, index in loader:
                loss = F.cross_entropy(model(x), y)
                run.step(loss)
                history.rows.append((epoch, loss.item().hex(), index.tolist()))
                if run.is_rank_zero:
                    (Path(result) / "progress").write_text(f"{run.place.attempt} {run.updates}")
        (Path(result) / f"rank{run.rank}.json").write_text(
            json.dumps(
                {
                    "updates": run.updates,
                    "weights": digest(model.state_dict()),
                    "average": digest(ema.module.state_dict()),
                    "history": hashlib.sha256(repr(history.rows).encode()).hexdigest(),
                    "rows": len(history.rows),
                    "random": torch.rand(1).item().hex(),
                }
            )
        )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
