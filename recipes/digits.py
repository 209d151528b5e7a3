"""How does a small training script look on every rank? A convolutional network on 1,797 handwritten digits.

    python recipes/digits.py                            # alone
    allranks run --nproc 2 recipes/digits.py            # on two ranks; or torchrun, or srun

The data come with scikit-learn: nothing is downloaded. Needs `pip install 'allranks[recipes]'`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset, random_split

import allranks


class Net(nn.Sequential):
    """Two convolutions and two layers: 75,000 parameters."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
            nn.Dropout(0.3), nn.Linear(64 * 16, 64), nn.ReLU(), nn.Linear(64, 10),
        )  # fmt: skip


def digits() -> tuple[torch.utils.data.Dataset, torch.utils.data.Dataset]:
    """Four fifths to train on and one fifth to test on, the same split everywhere."""
    bunch = load_digits()
    images = torch.from_numpy(bunch.images).float().unsqueeze(1) / 16  # (1797, 1, 8, 8), 0 to 1
    everything = TensorDataset(images, torch.from_numpy(bunch.target))
    train, test = random_split(everything, [0.8, 0.2], generator=torch.Generator().manual_seed(0))
    return train, test


@contextmanager
def progress_bar(total: int, show: bool) -> Iterator[Progress]:
    """One live bar for the whole job: the other ranks have the same object, switched off."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, disable=not show) as bar:
        bar.add_task("training", total=total)
        yield bar


def main() -> None:
    """Train, test after every epoch, say how fast it was."""
    parser = argparse.ArgumentParser(description="Digits on every rank.")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--run-dir", default=None, help="where the run is kept (default: runs/digits-...)")
    options = parser.parse_args()
    train_set, test_set = digits()

    with allranks.start(options.run_dir, global_batch_size=128, precision="fp32", seed=0) as run:
        model = run.model(Net())
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4))
        train, test = run.loader(train_set, shuffle=True), run.loader(test_set)
        began, accuracy = time.perf_counter(), 0.0
        with progress_bar(options.epochs * len(train), show=run.is_rank_zero) as bar:
            for epoch in run.epochs(options.epochs):
                for x, y in train:
                    loss = F.cross_entropy(model(x), y)
                    run.step(loss)
                    bar.advance(0)
                with run.evaluate(model):
                    correct = run.sum((model(x).argmax(1) == y).sum() for x, y in test)
                accuracy = float(correct) / len(test_set)
                run.log(epoch=epoch, accuracy=accuracy)
                bar.update(0, description=f"epoch {epoch + 1}: {accuracy:.1%}")
        seconds = time.perf_counter() - began
        ranks = "1 rank" if run.world_size == 1 else f"{run.world_size} ranks"
        run.print(f"test accuracy {accuracy:.2%} after {options.epochs} epochs on {ranks}")
        run.print(f"{options.epochs * len(train_set) / seconds:,.0f} samples/s, {seconds:.1f} s in all")
        run.print(f"run directory {run.run_dir}")


if __name__ == "__main__":
    main()
