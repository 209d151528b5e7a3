"""One rank of the measurement: trains the lm job with each way of sending, in turn, and rank 0 prints a line of JSON for each.

Started by measure.py. STEPS, WAYS and BATCH are in the environment. Every way begins with the same weights and sees the same batches.
"""

from __future__ import annotations

import json
import logging
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "overhead"))
os.environ.setdefault("JOB", "lm")

import torch
from job import dataset, model  # pyright: ignore[reportMissingImports]
from torch import nn

import allranks

STEPS = int(os.environ.get("STEPS", "40"))
BATCH = int(os.environ.get("BATCH", "32"))
NEVER = 1 << 30

WAYS: dict[str, dict[str, Any]] = {
    "solo": {"sync_every": NEVER},
    "ddp": {"shared_memory": False},
    "none": {},
    "bf16": {"compress": "bf16"},
    "fp16": {"compress": "fp16"},
    "int8": {"compress": "int8"},
    "powersgd": {"compress": "powersgd"},
    "sync_every=16": {"sync_every": 16},
    "sync_every=16, nesterov": {
        "sync_every": 16,
        "outer_optimizer": "nesterov",
        "outer_lr": 0.5,
        "outer_momentum": 0.5,
    },
    "sync_every=32": {"sync_every": 32},
    "auto": {"compress": "auto"},
    "auto, any": {"compress": "auto", "accuracy": "any"},
}


def train(name: str, folder: str) -> None:
    """One way, from the start."""
    settings = WAYS[name]
    every = settings.get("sync_every", 1)
    with allranks.start(
        f"{folder}/{name}", global_batch_size=BATCH * int(os.environ["WORLD_SIZE"]), threads=1, resume="never"
    ) as run:
        net = run.model(model(), **settings)
        run.optimizer(torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9))
        loader = run.loader(dataset(), shuffle=True, drop_last=True)
        times: list[float] = []
        losses: list[torch.Tensor] = []
        steps = STEPS if every in (1, NEVER) else -(-STEPS // every) * every
        while len(times) < steps:
            for x, y in loader:
                begun = time.perf_counter()
                loss = nn.functional.cross_entropy(net(x), y)
                run.step(loss)
                times.append(time.perf_counter() - begun)
                losses.append(loss.detach())
                if len(times) == steps:
                    break
        last = run.mean(torch.stack(losses[-8:]).mean())
        chosen = net.exchange.chooser.chosen if net.exchange and net.exchange.chooser else ""
        update = statistics.median(times[steps // 2 :])
        if every not in (1, NEVER):
            meetings = statistics.median(times[every - 1 :: every])
            alone = statistics.median(t for i, t in enumerate(times) if (i + 1) % every)
            update = alone + (meetings - alone) / every
        if run.is_rank_zero:
            found = {"way": name, "update_s": update, "loss": last, "chosen": chosen, "times": times}
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO if os.environ["RANK"] == "0" else logging.WARNING)
    port = int(os.environ["MASTER_PORT"])
    for number, way in enumerate(os.environ["WAYS"].split(";")):
        os.environ["MASTER_PORT"] = str(port + number)  # the one before may not be free yet
        train(way, os.environ["FOLDER"])
