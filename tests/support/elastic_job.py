"""A training whose number of ranks may change: each rank writes down the samples of each update.

python elastic_job.py FOLDER NUM_EPOCHS SAVE_STEPS [GATE ...], or train(...) in a rank of support.ranks. In start number k of a launcher
(counted from 0) the ranks stay after update GATE[k] until they are killed; FOLDER/gate-K-RANK says that they are there.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import allranks

BATCH, SAMPLES = 12, 238


class Numbered(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((3,), index / SAMPLES), index


def train(folder: str, num_epochs: int, save_steps: int, gates: tuple[int, ...] = ()) -> None:
    place = Path(folder)
    with allranks.start(place / "run", global_batch_size=BATCH, seed=4) as run:
        model = run.model(nn.Linear(3, 1))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        loader = run.loader(Numbered(), shuffle=True)
        run.save_every(steps=save_steps)
        attempt = run.place.attempt
        for epoch in run.epochs(num_epochs):
            for x, index in loader:
                run.step(model(x).square().mean())
                run.log(loss=0.5)
                with (place / f"seen-{attempt}-{run.rank}").open("a") as out:
                    out.write(json.dumps([epoch, run.updates, index.tolist()]) + "\n")
                if attempt < len(gates) and run.updates == gates[attempt]:
                    (place / f"gate-{attempt}-{run.rank}").touch()
                    time.sleep(600)
        (place / f"end-{run.rank}").write_text(f"{run.world_size} {run.updates}")


def seen(folder: Path) -> list[dict[tuple[int, int], list[int]]]:
    """By start: the samples of all ranks, by epoch and update."""
    starts: dict[int, dict[tuple[int, int], list[int]]] = {}
    for path in folder.glob("seen-*"):
        samples = starts.setdefault(int(path.name.split("-")[1]), {})
        for line in path.read_text().splitlines():
            epoch, update, indices = json.loads(line)
            samples.setdefault((epoch, update), []).extend(indices)
    return [{key: sorted(v) for key, v in starts[n].items()} for n in sorted(starts)]


if __name__ == "__main__":
    train(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), tuple(map(int, sys.argv[4:])))
