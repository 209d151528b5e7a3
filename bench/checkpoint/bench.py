"""How long does a save hold the training loop, and how long does it take in all? Ours beside torch.save and torch.distributed.checkpoint.

    python bench/checkpoint/bench.py [--mb 100] [--rounds 10] [--folder FOLDER] [--json]

The state is a real one: a model and its Adam, `mb` MB together. Every round saves it once in each way, in turn, so that all meet the
same load of the machine; figures are medians over the rounds, the first of which is left out and told apart (buffers are made then).
`held` is the time until the training may go on, `total` until the files are on the disk (fsync), `bytes` what they take. Ours copies
the optimizer's state while the next forward and backward run, so every way is followed by one, then by what is left to copy, which
counts as held, and so `total` of what is saved in the background has that forward and backward in it; `next_ms` is that forward and
backward, to be compared between the ways.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from allranks.ckpt import Checkpoints, Snapshot, random_states

STAYS = ("training.optimizers.adam.",)
"""As a run saves between two batches."""
BATCH = 64


@dataclass(frozen=True, slots=True)
class Took:
    """Seconds of one save, and its bytes."""

    held: float
    total: float
    next: float
    size: int


def make_state(mb: float, device: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model whose weights and Adam state take `mb` MB: a third weights."""
    width = 512
    layers = max(1, round(mb * 1e6 / 3 / 4 / (width * width)))
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers))).to(device)
    adam = torch.optim.Adam(model.parameters())
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    adam.step()
    return model, adam


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def size_of(folder: Path) -> int:
    return sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())


class Ways:
    """Each way to save."""

    def __init__(
        self, folder: Path, model: torch.nn.Module, adam: torch.optim.Optimizer, device: str
    ) -> None:
        self.folder, self.model, self.adam, self.device = folder, model, adam, device
        self.step = 0
        self.ours = Checkpoints(folder / "ours")
        self.ours.prepare(self.snapshot())
        self.ours.wait()

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.adam.state_dict()}

    def snapshot(self) -> Snapshot:
        return Snapshot(
            step=self.step,
            models={"model": self.model.state_dict()},
            training={"optimizers": {"adam": self.adam.state_dict()}},
            this_rank={"random": random_states()},
        )

    def train(self) -> float:
        """Forward and backward; the seconds they took."""
        begun = time.perf_counter()
        self.model.zero_grad()
        self.model(torch.ones(BATCH, 512, device=self.device)).sum().backward()
        synchronize(self.device)
        return time.perf_counter() - begun

    def plain(self, *, fsync: bool) -> Took:
        path = self.folder / "plain.pt"
        begun = time.perf_counter()
        with path.open("wb") as file:
            torch.save(self.state(), file)
            if fsync:
                file.flush()
                os.fsync(file.fileno())
        held = time.perf_counter() - begun
        size = path.stat().st_size
        path.unlink()
        return Took(held, held, self.train(), size)

    def allranks(self) -> Took:
        self.step += 1
        begun = time.perf_counter()
        saved = self.ours.save(self.snapshot(), stays=STAYS)
        held = time.perf_counter() - begun
        trained = self.train()
        again = time.perf_counter()
        self.ours.settle()
        held += time.perf_counter() - again
        self.ours.wait()
        total = time.perf_counter() - begun
        return Took(held, total, trained, size_of(self.folder / "ours" / saved.folder))

    def dcp_sync(self) -> Took:
        begun = time.perf_counter()
        dcp.save(self.state(), checkpoint_id=self.folder / "dcp")
        held = time.perf_counter() - begun
        size = size_of(self.folder / "dcp")
        shutil.rmtree(self.folder / "dcp")
        return Took(held, held, self.train(), size)

    def dcp_async(self) -> Took:
        begun = time.perf_counter()
        future: Any = dcp.async_save(self.state(), checkpoint_id=self.folder / "dcp_async")
        held = time.perf_counter() - begun
        trained = self.train()
        future.result()
        total = time.perf_counter() - begun
        size = size_of(self.folder / "dcp_async")
        shutil.rmtree(self.folder / "dcp_async")
        return Took(held, total, trained, size)


def measure(ways: dict[str, Callable[[], Took]], rounds: int, device: str) -> dict[str, Any]:
    rows: dict[str, list[Took]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, way in ways.items():
            synchronize(device)
            rows[name].append(way())
    table = {}
    for name, values in rows.items():
        held = [v.held for v in values[1:]]
        table[name] = {
            "held_ms": round(statistics.median(held) * 1e3, 1),
            "held_ms_max": round(max(held) * 1e3, 1),
            "held_ms_first": round(values[0].held * 1e3, 1),
            "total_ms": round(statistics.median(v.total for v in values[1:]) * 1e3, 1),
            "next_ms": round(statistics.median(v.next for v in values[1:]) * 1e3, 1),
            "bytes": values[-1].size,
        }
    # Round by round, so that a burst of load on the machine meets both.
    for base in ("torch.save", "torch.save + fsync"):
        ratios = [a.held / b.held for a, b in zip(rows["allranks"][1:], rows[base][1:], strict=True)]
        table["allranks"][f"held / {base}"] = round(statistics.median(ratios), 3)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mb", type=float, default=100)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--folder", help="on the disk to measure; the system's temporary folder if not given")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
    dist.init_process_group(
        "gloo", store=dist.HashStore(), rank=0, world_size=1
    )  # dcp's async_save needs a group
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    try:
        model, adam = make_state(args.mb, args.device)
        ways = Ways(folder, model, adam, args.device)
        table = measure(
            {
                "torch.save": lambda: ways.plain(fsync=False),
                "torch.save + fsync": lambda: ways.plain(fsync=True),
                "allranks": ways.allranks,
                "dcp.save": ways.dcp_sync,
                "dcp.async_save": ways.dcp_async,
            },
            args.rounds,
            args.device,
        )
    finally:
        dist.destroy_process_group()
        shutil.rmtree(folder)
    about = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "device": args.device,
    }
    load = os.getloadavg()[0]
    if args.json:
        print(
            json.dumps({"about": about, "load": load, "mb": args.mb, "rounds": args.rounds, "table": table})
        )
        return
    print(f"{args.mb:g} MB of state, {args.rounds} rounds, {about}, load {load:.1f}")
    for name, row in table.items():
        print(f"{name:20} " + "  ".join(f"{key} {value}" for key, value in row.items()))


if __name__ == "__main__":
    main()
