"""How does a script with 70,000 real images look on every rank? Fashion-MNIST to 90 % and more.

    apt-get install dataset-fashion-mnist               # Debian and Ubuntu; or --data FOLDER with the four files
    allranks run --nproc 2 recipes/fashion.py

FOLDER holds train-images-idx3-ubyte.gz, train-labels-idx1-ubyte.gz and the same two for t10k.
"""

from __future__ import annotations

import argparse
import gzip
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, Subset

import allranks

DEBIAN = Path("/usr/share/datasets/fashion-mnist")
MEAN, DEVIATION = 0.2860, 0.3530  # of the training pixels, scaled to 0..1


def read_idx(path: Path) -> torch.Tensor:
    """One file of the IDX format: two zero bytes, the type (8: bytes), the number of dims, the sizes, the data."""
    data = gzip.decompress(path.read_bytes())
    if data[:3] != b"\0\0\x08":
        raise SystemExit(f"{path} is not an IDX file of bytes: it begins with {data[:4]!r}")
    num_dims = data[3]
    shape = np.frombuffer(data, ">u4", count=num_dims, offset=4)
    values = np.frombuffer(data, np.uint8, offset=4 + 4 * num_dims)
    return torch.from_numpy(values.reshape(tuple(shape)).copy())


class Fashion(Dataset):
    """Grey 28 x 28 pictures of clothes in ten classes; a random flip makes two of each in training."""

    def __init__(self, folder: Path, split: str, flip: bool) -> None:
        images = folder / f"{split}-images-idx3-ubyte.gz"
        if not images.exists():
            raise SystemExit(f"no {images}: apt-get install dataset-fashion-mnist, or --data FOLDER")
        self.images = read_idx(images)
        self.labels = read_idx(folder / f"{split}-labels-idx1-ubyte.gz").long()
        self.flip = flip

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        image = (self.images[index].float() / 255 - MEAN) / DEVIATION  # (28, 28)
        if self.flip and torch.rand(()) < 0.5:
            image = image.flip(1)
        return image.unsqueeze(0), self.labels[index]


class Net(nn.Sequential):
    """Three convolutions and two layers: 200,000 parameters."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 16, 3, padding=1, stride=2), nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.Flatten(),
            nn.Dropout(0.2), nn.Linear(64 * 49, 64), nn.ReLU(), nn.Linear(64, 10),
        )  # fmt: skip


def main() -> None:
    """Train, test after every epoch, say how good and how fast."""
    parser = argparse.ArgumentParser(description="Fashion-MNIST on every rank.")
    parser.add_argument(
        "--data", type=Path, default=DEBIAN, help=f"folder of the four files (default {DEBIAN})"
    )
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--steps", type=int, default=None, help="stop each epoch after so many updates")
    parser.add_argument("--run-dir", default=None, help="where the run is kept (default: runs/fashion-...)")
    options = parser.parse_args()
    batch = 256
    train_set, test_set = Fashion(options.data, "train", flip=True), Fashion(options.data, "t10k", flip=False)
    if options.steps is not None:
        train_set = Subset(train_set, range(min(len(train_set), options.steps * batch)))

    with allranks.start(options.run_dir, global_batch_size=batch, precision="fp32", seed=0) as run:
        model = run.model(Net())
        train, test = run.loader(train_set, shuffle=True), run.loader(test_set)
        optimizer = run.optimizer(torch.optim.AdamW(model.parameters(), lr=2e-3))
        updates = options.epochs * len(train)
        run.scheduler(torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=4e-3, total_steps=updates))
        for epoch in run.epochs(options.epochs):
            began = time.perf_counter()
            for x, y in train:
                loss = F.cross_entropy(model(x), y)
                run.step(loss)
            seconds = time.perf_counter() - began
            with run.evaluate(model):
                correct = run.sum((model(x).argmax(1) == y).sum() for x, y in test)
            accuracy = float(correct) / len(test_set)
            run.log(epoch=epoch, accuracy=accuracy, samples_per_s=len(train_set) / seconds)
            speed = f"{len(train_set) / seconds:,.0f} samples/s"
            run.print(f"epoch {epoch + 1}: test accuracy {accuracy:.2%}, {speed}")
        run.print(f"run directory {run.run_dir}")


if __name__ == "__main__":
    main()
