"""Do the parts of a step agree with torch's profiler, in one run of two ranks, one of which is slow?"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from allranks import record
from allranks.perf.breakdown import Breakdown, breakdown
from allranks.perf.history import step_of
from allranks.perf.values import PHASES, History, RankHistory, Sample, StepTimes
from allranks.record import layout as at
from allranks.record import page, process
from support.ranks import run_ranks

pytestmark = pytest.mark.ranks
STEPS, WARM_UP = 12, 3


class Slow(torch.utils.data.Dataset):
    """Samples that take a while to read."""

    def __len__(self) -> int:
        return 64 * (STEPS + WARM_UP)

    def __getitem__(self, index: int) -> torch.Tensor:
        if index % 64 == 0:
            time.sleep(0.006)
        return torch.full((384,), float(index % 7))


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor, pause_s: float) -> None:
    optimizer.zero_grad()
    loss = model(batch).square().mean()
    time.sleep(pause_s)
    with record_function("whole backward"):
        loss.backward()
    optimizer.step()


def times_now() -> Sample:
    process.WRITER.flush()
    found = page.parse(bytes(process.WRITER.buffer), "").times
    assert found is not None
    phases = {name: found.phase_ns[page.Phase[name.upper()]] / 1e9 for name in PHASES}
    return Sample(
        t=found.at_ns / 1e9,
        step=found.step,
        phases=phases,
        buffers_s=found.buffers_ns / 1e9,
        exchanged_s=found.exchanged_ns / 1e9,
        exchanged_of_s=found.exchanged_of_ns / 1e9,
    )


def train(rank_pauses: list[float]) -> tuple[RankHistory, dict[str, float]]:
    """What the record says of some steps, and the same parts by the profiler."""
    at.TIMED_EVERY_NS = 0  # every step
    record.install()
    rank = dist.get_rank()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(384, 384), nn.ReLU()) for _ in range(6)]
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.Adam(model.parameters())
    batches = iter(torch.utils.data.DataLoader(Slow(), batch_size=64))
    for _ in range(WARM_UP):
        one_step(model, optimizer, next(batches), 0.0)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        before = times_now()
        with record_function("all"):
            for _ in range(STEPS):
                one_step(model, optimizer, next(batches), rank_pauses[rank])
        after = times_now()
    steps = tuple(map(moments, page.parse(bytes(process.WRITER.buffer), "").timed[-STEPS:]))
    return RankHistory(rank, 0, "here", 0, (before, after), steps), parts_of_trace(profiler.events())


def moments(timed: page.TimedStep) -> StepTimes:
    row = [
        timed.step,
        *(getattr(timed, name) // 1000 for name in page.TimedStep.__dataclass_fields__ if name != "step"),
        0,
    ]
    return step_of(row)


def parts_of_trace(events: Any) -> dict[str, float]:
    """Seconds of each part, from what torch itself notes."""
    spans = [(e.name, e.time_range.start / 1e6, e.time_range.end / 1e6) for e in events]

    def total(*begins: str) -> float:
        return sum(end - start for name, start, end in spans if name.startswith(begins))

    backwards = [(start, end) for name, start, end in spans if name == "whole backward"]
    gradients = [end for name, _, end in spans if name == "torch::autograd::AccumulateGrad"]
    ready = [max(t for t in gradients if start <= t <= end) for start, end in backwards]
    exchanged = sum(end - last for (_, end), last in zip(backwards, ready, strict=True))
    return {
        "data": total("enumerate(DataLoader)"),
        "forward": total("DistributedDataParallel.forward"),
        "optimizer": total("Optimizer.step"),
        "backward": sum(end - start for start, end in backwards) - exchanged,
        "exchange and waiting": exchanged,
        "all": total("all") - total("all_"),
    }


ATTEMPTS = 4
"""What another process takes between torch's clock and ours is in one of the two: a run that is disturbed says nothing."""


@pytest.mark.timeout(300)
def test_parts_of_two_ranks_then_they_add_up_and_agree_with_the_profiler() -> None:
    found, differences = measured()
    for _ in range(ATTEMPTS - 1):
        if differences:
            found, differences = measured()
    assert not differences
    # Of the same run: the rank that sleeps is waited for, and waits less itself.
    first, second = found.ranks
    assert first.steps == second.steps == STEPS
    assert first.parts["waiting"] > 0.5 * 0.015 * STEPS > second.parts["waiting"]


def measured() -> tuple[Breakdown, list[str]]:
    """One run, and where it is not as its traces."""
    results = run_ranks(2, train, [0.0, 0.015])
    found = breakdown(History(0, 1, 2, (), tuple(rank for rank, _ in results)))
    pairs = zip(found.ranks, results, strict=True)
    return found, [text for parts, (_, trace) in pairs for text in differing(parts.parts, trace)]


def differing(parts: Mapping[str, float], trace: Mapping[str, float]) -> list[str]:
    """The parts that are not as in the trace, and the sum if it is not the whole."""
    ours = {
        **parts,
        "exchange and waiting": parts["exchange"] + parts["waiting"],
        "all": sum(parts.values()),
    }
    whole = trace["all"]
    within = {"all": 0.05 * whole}
    names = ("data", "forward", "optimizer", "backward", "exchange and waiting", "all")
    return [
        f"{name}: {ours[name]:.4f} s, in the trace {trace[name]:.4f} s"
        for name in names
        if abs(ours[name] - trace[name]) > within.get(name, max(0.1 * trace[name], 0.01 * whole))
    ]
