"""One plain DDP script that is slow for one reason: `allranks run --nproc 2 slow_job.py KIND [SECONDS]`; see slow.py."""

from __future__ import annotations

import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

KIND, SECONDS = sys.argv[1], float(sys.argv[2]) if len(sys.argv) > 2 else 10.0
RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class Samples(Dataset):
    """Each takes `sleep_s` to read, or `work_s` of a core."""

    def __init__(self, sleep_s: float = 0.0, work_s: float = 0.0, width: int = 256) -> None:
        self.sleep_s, self.work_s, self.width = sleep_s, work_s, width

    def __len__(self) -> int:
        return 512 if KIND == "restarts" else 1 << 14

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if self.sleep_s:
            time.sleep(self.sleep_s)
        until = time.thread_time() + self.work_s
        while time.thread_time() < until:
            pass
        return torch.full((self.width,), float(index % 7)), index % 10


class Sleeps(torch.autograd.Function):
    """An identity whose backward takes a while before any gradient is there."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        time.sleep(0.02)
        return gradient


def busy(seconds: float) -> None:
    """Use a core."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    if KIND != "threads":
        torch.set_num_threads(1)
    if KIND == "one_core":
        os.sched_setaffinity(0, {0})  # as an import may do
    sizes = {"one_bucket": (1024, 4), "many_buckets": (192, 48), "short_steps": (64, 2), "threads": (128, 2)}
    width, layers = sizes.get(KIND, (384, 4))
    ballast = torch.zeros(1 << 24)
    body = [nn.Linear(256, width)]
    for _ in range(layers):
        body += [nn.BatchNorm1d(width)] if KIND in ("buffers", "healthy_buffers") else []
        body += [nn.Linear(width, width), nn.ReLU()]
    if KIND == "buffers":
        body += [nn.BatchNorm1d(width) for _ in range(40)]
    options = {
        "unused": {"find_unused_parameters": True},
        "one_bucket": {"bucket_cap_mb": 512},
        "many_buckets": {"bucket_cap_mb": 0.02},
    }.get(KIND, {})
    model = DDP(nn.Sequential(*body, nn.Linear(width, 10)), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    data = Samples(
        sleep_s=0.001
        if KIND in ("loader_bound", "slow_disk") and (KIND == "loader_bound" or RANK == 1)
        else 0.0,
        width=48_000 if KIND == "shm" else 256,
        work_s=0.0015 if KIND in ("workers", "one_core", "loader_work") else 0.0,
    )
    workers = {"workers": 4, "one_core": 2, "loader_bound": 1, "restarts": 2, "shm": 2}.get(KIND, 0)
    batch = {"short_steps": 2, "one_bucket": 16, "many_buckets": 16}.get(KIND, 32)
    loader = DataLoader(data, batch, sampler=DistributedSampler(data, shuffle=False), num_workers=workers)
    every = 4 if KIND == "no_sync" else 1
    stop, step, total = time.monotonic() + SECONDS, 0, 0.0
    log = Path(os.environ.get("TMPDIR", "/tmp"), f"slow_job_{os.getpid()}.pt")
    board = None
    if KIND == "logging" and RANK == 0:
        from torch.utils.tensorboard import SummaryWriter

        board = SummaryWriter(os.environ.get("TMPDIR", "/tmp"))
    going = torch.ones(())
    if KIND == "first_batch":
        time.sleep(0.5)
    while going.item():
        for x, y in loader:
            if KIND == "first_batch" and step == 0:
                busy(4.0)  # as a compiler would
            loss = nn.functional.cross_entropy(model(x[:, :256]), y)
            if KIND == "slow_backward" and RANK == 1:
                loss = Sleeps.apply(loss)
            if KIND == "slow_rank" and RANK == 1:
                busy(0.04)
            is_last = (step + 1) % every == 0
            with nullcontext() if is_last else model.no_sync():  # around backward only
                loss.backward()
            if is_last:
                optimizer.step()
                optimizer.zero_grad()
            step += 1
            if KIND == "print":
                for k in range(600):
                    print(f"step {step} value {k} loss {loss.item():.6f}", flush=True)
            if board is not None:
                for k in range(200):
                    board.add_scalar(f"weights/norm{k}", 1.0 + k, step)
            if KIND == "metrics":
                for _ in range(20):
                    value = loss.detach().clone()
                    dist.all_reduce(value)
                    total += value.item() / RANKS
            if KIND == "checkpoint" and step % 20 == 0 and RANK == 0:
                torch.save(
                    {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "big": ballast}, log
                )
            if step % 20 == 0:
                going.fill_(float(time.monotonic() < stop))
                dist.all_reduce(going, op=dist.ReduceOp.MIN)
                if not going.item():
                    break
    log.unlink(missing_ok=True)
    dist.destroy_process_group()


main()
