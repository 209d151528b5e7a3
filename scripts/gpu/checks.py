"""The checks of scripts/gpu_check, one a process: python scripts/gpu/checks.py NAME cuda|cpu FOLDER

Each raises if what it looks at is wrong, and else says what it saw.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import allranks

CHECKS: dict[str, Callable[[torch.device, Path], str]] = {}


def check(function: Callable[[torch.device, Path], str]) -> Callable[[torch.device, Path], str]:
    """Make a function a check of its name."""
    CHECKS[function.__name__] = function
    return function


def data(samples: int = 512, width: int = 32) -> TensorDataset:
    """Samples that a small net can learn."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, width, generator=generator)
    return TensorDataset(x, (x[:, :4].argmax(1)).long())


def net(width: int = 32) -> nn.Module:
    """A small net with the same weights each time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 128), nn.ReLU(), nn.Linear(128, 4))


def train(
    device: torch.device, folder: Path, updates: int, **settings: Any
) -> tuple[list[torch.Tensor], list[float]]:
    """Weights and losses of a training with one global batch of 64, on however many ranks there are."""
    losses: list[float] = []
    with allranks.start(folder, global_batch_size=64, device=device, **settings) as run:
        model = run.model(net())
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        loader = run.loader(data(), shuffle=True, drop_last=True)
        while len(losses) < updates:
            for x, y in loader:
                loss = nn.functional.cross_entropy(model(x), y)
                run.step(loss)
                losses.append(loss.detach().item())
                if len(losses) == updates:
                    break
        return [p.detach().cpu().clone() for p in model.parameters()], losses


@check
def device(on: torch.device, folder: Path) -> str:
    """What is here."""
    if on.type == "cpu":
        return f"torch {torch.__version__} on {os.cpu_count()} cores"
    about = torch.cuda.get_device_properties(on)
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else "none"
    size = about.total_memory >> 30
    return f"{about.name}, {size} GiB, sm_{about.major}{about.minor}; torch {torch.__version__}, CUDA {torch.version.cuda}, NCCL {nccl}"


@check
def nccl_one(on: torch.device, folder: Path) -> str:
    """NCCL with one rank."""
    dist.init_process_group("nccl", device_id=on)
    value = torch.arange(8.0, device=on)
    dist.all_reduce(value)
    assert torch.equal(value.cpu(), torch.arange(8.0)), value
    dist.destroy_process_group()
    return "all_reduce of one rank is the value itself"


@check
def two_ranks(on: torch.device, folder: Path) -> str:
    """Two ranks share the device, over Gloo on a GPU too (NCCL refuses two ranks on one), and train as one process does."""
    settings: dict[str, Any] = {}
    if on.type == "cuda":
        settings["backend"] = "gloo"  # NCCL refuses two ranks on one GPU
    weights, _ = train(on, folder / "several", 16, **settings)
    if int(os.environ["RANK"]) != 0:
        return ""
    alone = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("RANK", "WORLD", "LOCAL", "MASTER", "ALLRANKS", "GROUP", "TORCHELASTIC"))
    }
    torch.save(weights, folder / "weights.pt")
    command = [sys.executable, __file__, "compare_alone", on.type, str(folder)]
    done = subprocess.run(command, env=alone, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    over = "Gloo with CUDA tensors" if on.type == "cuda" else "Gloo and memory"
    return f"{over}: weights after 16 updates as on one rank, to 1e-5"


@check
def compare_alone(on: torch.device, folder: Path) -> str:
    """The other half of two_ranks."""
    weights, _ = train(on, folder / "alone", 16)
    for mine, theirs in zip(weights, torch.load(folder / "weights.pt"), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    return ""


@check
def prefetch(on: torch.device, folder: Path) -> str:
    """Slow kernels still read a batch when the loop has dropped it: no batch may be overwritten by the next."""
    count, size = 64, 1 << 14
    values = torch.arange(float(count)).repeat_interleave(size).view(count, size)
    work = torch.randn(512, 512, device=on)
    sums: list[torch.Tensor] = []
    with allranks.start(folder, global_batch_size=1, device=on) as run:
        loader = run.loader(TensorDataset(values), shuffle=False, train=True, num_workers=0)
        model = run.model(nn.Linear(1, 1))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.0))
        for (x,) in loader:
            for _ in range(8):
                work = torch.tanh(work @ work)
            sums.append(x.double().mean())
            run.step(model(x[:, :1]).sum() * 0)
            del x
    got = torch.stack(sums).cpu()
    assert torch.equal(got, torch.arange(float(count)).double()), got
    return f"{count} batches, each read after {8} products, all right"


def amp(on: torch.device, folder: Path, precision: str) -> str:
    """Train in half precision."""
    _, losses = train(on, folder / precision, 40, precision=precision)
    first, last = sum(losses[:5]) / 5, sum(losses[-5:]) / 5
    assert last < 0.7 * first, (first, last)
    return f"loss {first:.3f} to {last:.3f} in 40 updates"


@check
def amp_bf16(on: torch.device, folder: Path) -> str:
    """bf16."""
    return amp(on, folder, "bf16")


@check
def amp_fp16(on: torch.device, folder: Path) -> str:
    """fp16, with one loss that overflows."""
    told = amp(on, folder, "fp16")
    with allranks.start(folder / "overflow", device=on, precision="fp16") as run:
        model = run.model(nn.Linear(4, 1))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        before = model.module.weight.detach().clone()
        update = run.step(model(torch.ones(2, 4, device=on)).sum() * 1e36)
        assert update is not None and update.skipped and torch.equal(before, model.module.weight)
    return f"{told}; an overflow skipped its update"


@check
def fused(on: torch.device, folder: Path) -> str:
    """Fused against plain."""
    worst = 0.0
    for number, kind in enumerate((torch.optim.SGD, torch.optim.AdamW)):
        found = []
        for is_fused in (False, True):
            with allranks.start(folder / f"{number}{is_fused}", device=on) as run:
                model = run.model(net())
                optimizer = run.optimizer(kind(model.parameters(), lr=0.01), fused=is_fused)
                assert bool(optimizer.param_groups[0].get("fused")) == is_fused
                x, y = (t[:64].to(on) for t in data().tensors)
                for _ in range(20):
                    run.step(nn.functional.cross_entropy(model(x), y))
                found.append([p.detach().cpu() for p in model.parameters()])
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
            worst = max(worst, float((a - b).abs().max()))
    return f"SGD and AdamW, 20 updates: at most {worst:.1e} apart"


@check
def no_sync(on: torch.device, folder: Path) -> str:
    """torch raises at whatever waits for the device inside run.step."""
    with allranks.start(folder, device=on) as run:
        model = run.model(net())
        run.optimizer(torch.optim.AdamW(model.parameters(), lr=0.01), clip_norm=1.0)
        x, y = (t[:64].to(on) for t in data().tensors)
        for step in range(8):
            if step == 3:
                torch.cuda.set_sync_debug_mode("error")
            run.step(nn.functional.cross_entropy(model(x), y))
        torch.cuda.set_sync_debug_mode("default")
    return "five updates with clipping, none waited"


@check
def graph(on: torch.device, folder: Path) -> str:
    """The step of a net in a graph, and outside."""
    x, y = (t[:64].to(on) for t in data().tensors)
    nets = [net().to(on) for _ in range(2)]
    optimizers = [torch.optim.AdamW(n.parameters(), lr=0.01, capturable=True) for n in nets]

    def step(place: int) -> None:
        optimizers[place].zero_grad(set_to_none=True)
        nn.functional.cross_entropy(nets[place](x), y).backward()
        optimizers[place].step()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(0)
    torch.cuda.current_stream().wait_stream(side)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        step(0)
    for _ in range(10):
        captured.replay()
    for _ in range(13):
        step(1)
    torch.cuda.synchronize()
    for a, b in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    return "13 updates with the record's marks in place, 10 of them replayed"


@check
def checkpoint(on: torch.device, folder: Path) -> str:
    """Saved while the weights go on changing; then resumed."""
    held = 0.0
    with allranks.start(folder / "run", device=on, global_batch_size=64) as run:
        model = run.model(nn.Sequential(nn.Linear(32, 2048), nn.Linear(2048, 2048), nn.Linear(2048, 4)))
        run.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
        loader = run.loader(data(), shuffle=True, drop_last=True)
        run.save_every(steps=5)
        for _ in run.epochs(1):
            for x, y in loader:
                begun = time.perf_counter()
                run.step(nn.functional.cross_entropy(model(x), y))
                held = max(held, time.perf_counter() - begun)
        kept = [p.detach().cpu().clone() for p in model.parameters()]
    with allranks.start(folder / "run", device=on, global_batch_size=64) as run:
        model = run.model(nn.Sequential(nn.Linear(32, 2048), nn.Linear(2048, 2048), nn.Linear(2048, 4)))
        run.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
        run.loader(data(), shuffle=True, drop_last=True)
        for _ in run.epochs(1):
            raise AssertionError("the epoch was over")
        for mine, saved in zip(model.parameters(), kept, strict=True):
            assert torch.equal(mine.detach().cpu(), saved)
    return f"the last save holds the last weights; longest step {held * 1e3:.0f} ms"


@check
def events(on: torch.device, folder: Path) -> str:
    """Kernel time of some steps by CUDA events, and by the profiler."""
    module = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(4))).to(on)
    x = torch.randn(2048, 4096, device=on)

    def step() -> None:
        module(x).square().mean().backward()
        module.zero_grad()

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(10):
        step()
    end.record()
    torch.cuda.synchronize()
    by_events = begin.elapsed_time(end)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(10):
            step()
        torch.cuda.synchronize()
    by_profiler = sum(e.self_device_time_total for e in profiler.key_averages()) / 1e3
    assert abs(by_events - by_profiler) < 0.15 * by_events, (by_events, by_profiler)
    return f"10 steps: {by_events:.1f} ms by events, {by_profiler:.1f} ms by the profiler"


@check
def tests(on: torch.device, folder: Path) -> str:
    """The project's tests of what touches devices."""
    root = Path(__file__).parent.parent.parent
    names = [
        "tests/unit/test_kernels.py",
        *(str(p) for p in sorted((root / "tests/unit").glob("*transfer*.py"))),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *names],
        cwd=root,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-1500:]
    return f"{len(names)} files of tests"


def main() -> None:
    """Do one check."""
    warnings.simplefilter("default")
    name, kind, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    on = torch.device("cuda", 0) if kind == "cuda" else torch.device("cpu")
    seen = CHECKS[name](on, folder)
    if seen:
        (folder / "seen.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
