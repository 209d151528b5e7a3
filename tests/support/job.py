"""A small training in this process that saves, is stopped, and is started again; tests change parts of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import allranks
from allranks import ckpt

DATA = torch.utils.data.TensorDataset(torch.arange(24.0).reshape(12, 2) / 24, torch.zeros(12))


class Job:
    """One training, with parts that a test can change."""

    def __init__(self, run_dir: Path, **start: Any) -> None:
        self.run_dir, self.start = run_dir, start
        self.width, self.num_epochs = 3, 2
        self.save_every: dict[str, Any] | None = {"steps": 2}
        self.before: Any = lambda run: None
        self.after_step: Any = lambda run: None
        self.after_loop: Any = lambda run: None

    def make(self, run: Any) -> None:
        self.model = run.model(nn.Sequential(nn.Linear(2, self.width), nn.Linear(self.width, 1)))
        self.sgd = run.optimizer(torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9))

    def train(self) -> Job:
        with allranks.start(self.run_dir, global_batch_size=4, device="cpu", **self.start) as run:
            self.run = run
            self.make(run)
            loader = run.loader(DATA, shuffle=True)
            if self.save_every is not None:
                run.save_every(**self.save_every)
            self.before(run)
            self.seen: list[tuple[int, int]] = []
            for epoch in run.epochs(self.num_epochs):
                for x, _ in loader:
                    run.step(self.model(x).square().mean())
                    self.after_step(run)
                    self.seen.append((epoch, run.updates))
                self.after_loop(run)
        return self

    def weights(self) -> list[list[float]]:
        return [p.tolist() for p in self.model.parameters()]

    def steps(self) -> list[str]:
        return ckpt.list_folders(ckpt.open_store(self.run_dir / "checkpoints"))


class Stop(Exception):
    pass


def stop_at(update: int) -> Any:
    def after_step(run: Any) -> None:
        if run.updates == update:
            run._checkpoints.wait()
            raise Stop

    return after_step
