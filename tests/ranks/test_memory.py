"""Are gradients that travel through shared memory the ones that the group would have made, on any number of ranks, in any dtype?"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import allranks
from allranks.comm.memory import MemorySum, Refused, open_memory
from allranks.comm.memory.summing import SMALL_BYTES
from allranks.core.errors import CommError
from allranks.wrap.model import Model
from support.ranks import run_outcomes, run_ranks

pytestmark = pytest.mark.ranks

_SIZES = (1, 7, 1000, 40_001, 3)


def opened(num_bytes: int) -> MemorySum:
    memory = open_memory(num_bytes)
    assert isinstance(memory, MemorySum), memory
    return memory


def own(size: int, dtype: torch.dtype, rank: int, turn: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * turn + 10 * rank + size)
    return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)


def average_several(dtype: torch.dtype, num_bytes: int) -> list[torch.Tensor]:
    """Three steps of five buckets each: what this rank got."""
    memory, rank = opened(num_bytes), dist.get_rank()
    out: list[torch.Tensor] = []
    for turn in range(3):
        tensors = [own(size, dtype, rank, turn) for size in _SIZES]
        futures = [memory.add(t, i + 1 == len(tensors)) for i, t in enumerate(tensors)]
        for tensor, future in zip(tensors, futures, strict=True):
            assert future.wait() is tensor or torch.equal(future.wait(), tensor)
        out += tensors
    return out


def expected(dtype: torch.dtype, world_size: int) -> list[torch.Tensor]:
    """In rank order, in float32 at least, as one process would add them."""
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    out: list[torch.Tensor] = []
    for turn in range(3):
        for size in _SIZES:
            total = own(size, dtype, 0, turn).to(wide)
            for rank in range(1, world_size):
                total = total + own(size, dtype, rank, turn).to(wide)
            out.append((total / world_size).to(dtype))
    return out


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_average_when_added_in_rank_order_then_bits_of_one_process(world_size: int) -> None:
    assert _SIZES[3] * 4 > SMALL_BYTES  # one is added up in parts
    for got in run_ranks(world_size, average_several, torch.float32, 1 << 20):
        assert all(torch.equal(g, e) for g, e in zip(got, expected(torch.float32, world_size), strict=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_average_when_dtype_is_another_then_bits_of_one_process(dtype: torch.dtype) -> None:
    for got in run_ranks(3, average_several, dtype, 1 << 20):
        assert all(torch.equal(g, e) for g, e in zip(got, expected(dtype, 3), strict=True))


@pytest.mark.parametrize("num_bytes", [1, 1000, 100_000])
def test_average_when_memory_is_smaller_than_the_tensors_then_in_turns(num_bytes: int) -> None:
    for got in run_ranks(3, average_several, torch.float32, num_bytes):
        assert all(torch.equal(g, e) for g, e in zip(got, expected(torch.float32, 3), strict=True))


def average_for_long(turns: int) -> bool:
    """Ranks of different and changing speed; the counters go round their 32 bits."""
    memory, rank = opened(4096), dist.get_rank()
    memory._posted = 0xFFFFFFFF - 50
    memory.counters.post(memory._posted)
    dist.barrier()
    for turn in range(turns):
        values = torch.full((8,), float(turn * (rank + 1)))
        if (turn * 7 + rank * 3) % 11 == 0:
            time.sleep(0.001)
        memory.add(values, True).wait()
        if values.tolist() != [turn * (1 + 2 + 3) / 3] * 8:
            return False
    return True


def test_average_when_ranks_run_at_different_speed_then_never_a_stale_value() -> None:
    assert run_ranks(3, average_for_long, 400) == [True] * 3


class Branches(nn.Module):
    """Two heads, of which a forward uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.a, self.b = nn.Linear(16, 64), nn.Linear(64, 4), nn.Linear(64, 4)

    def forward(self, x: torch.Tensor, use_b: bool) -> torch.Tensor:
        hidden = self.body(x).relu()
        return self.b(hidden) if use_b else self.a(hidden)


def train_branches(how: str, setting: Any) -> list[torch.Tensor]:
    """Four updates of accumulated windows; which head is used differs by rank and step, unless the graph is static."""
    torch.manual_seed(0)
    rank = dist.get_rank()
    model = Model(
        Branches(),
        torch.device("cpu"),
        world_size=dist.get_world_size(),
        shared_memory=setting,
        bucket_cap_mb=0.001,
        static_graph=how == "static_graph",
        find_unused_parameters=how == "find_unused",
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(rank)
    for step in range(4):
        if how == "frozen" and step == 2:
            for p in model.module.get_submodule("body").parameters():
                p.requires_grad_(False)
        for micro_step in range(2):
            model.window.is_last = (
                how == "static_graph" or micro_step == 1
            )  # a static graph has no window of several
            use_b = how != "static_graph" and (rank + step) % 2 == 1
            model(torch.randn(8, 16, generator=generator), use_b).square().mean().backward()
            if model.window.is_last:
                model.complete()
                optimizer.step()
                optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def compare_branches(how: str) -> None:
    through_memory = train_branches(how, True)
    for a, b in zip(through_memory, train_branches(how, False), strict=True):
        assert torch.equal(a, b)  # two ranks: dividing by 2 is exact, and a + b has one order


@pytest.mark.parametrize("how", ["completed", "find_unused", "static_graph", "frozen"])
@pytest.mark.filterwarnings("default")  # of DDP, about options that the test asks for
def test_training_when_through_memory_then_bits_of_the_group(how: str) -> None:
    run_ranks(2, compare_branches, how)


def gradients(setting: Any, steps: int) -> tuple[bool, list[torch.Tensor]]:
    """Whether memory was used, and the gradients of the last step on this rank."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    model = Model(
        module,
        torch.device("cpu"),
        world_size=dist.get_world_size(),
        shared_memory=setting,
        bucket_cap_mb=0.01,
    )
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        model.zero_grad()
        model(torch.randn(8, 16, generator=generator)).square().sum().backward()
    assert model.replica is not None
    uses_memory = "average_through" in str(model.replica._get_ddp_logging_data().get("comm_hook", ""))
    return uses_memory, [p.grad.clone() for p in model.parameters() if p.grad is not None]


def compare_with_group(steps: int) -> None:
    used, through_memory = gradients("auto", steps)
    not_used, through_group = gradients(False, steps)
    assert used and not not_used
    for a, b in zip(through_memory, through_group, strict=True):
        # Two roundings of a sum of up to 3 terms and one of the division, on either way.
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        if dist.get_world_size() == 2:
            assert torch.equal(a, b)


@pytest.mark.parametrize("world_size", [2, 3])
def test_backward_when_through_memory_then_what_the_group_gives(world_size: int) -> None:
    run_ranks(world_size, compare_with_group, 3)  # the second step has rebuilt buckets


def links() -> list[str]:
    """What this process' descriptors are."""
    found: list[str] = []
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            found.append(str(fd.readlink()))
    return found


def see_memory() -> tuple[list[str], list[str], list[str]]:
    """What this rank keeps open beside what it had, where it has mapped the memory from, and what it keeps afterwards."""
    before = set(links())
    memory = opened(1 << 16)
    kept = [link for link in links() if link not in before]
    mapped = [
        line.split(maxsplit=5)[5]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "memfd" in line
    ]
    del memory
    return kept, mapped, [link for link in links() if "pidfd" in link or "memfd" in link]


def test_memory_when_open_then_it_is_no_file_and_goes_with_its_last_user() -> None:
    for kept, mapped, after in run_ranks(3, see_memory):
        assert not any(link.startswith("/dev/shm") for link in kept)
        assert len(mapped) == 1 and mapped[0].strip() == "/memfd:allranks (deleted)"
        assert after == []


def wait_for_dead(how: str) -> tuple[str, float]:
    memory = opened(4096)
    tensor = torch.ones(8)
    memory.add(tensor, True)
    if dist.get_rank() == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "exit":
            os._exit(3)
        if how == "left":
            from allranks.comm.memory import leave_all

            leave_all()
            time.sleep(1.0)
            return "", 0.0
    begun = time.monotonic()
    try:
        memory.add(tensor, True)
    except CommError as error:
        return error.code + " " + error.what, time.monotonic() - begun
    return "no error", 0.0


@pytest.mark.parametrize("how", ["killed", "exit", "left"])
def test_wait_when_a_rank_is_gone_then_the_others_name_it(how: str) -> None:
    outcomes = run_outcomes(3, wait_for_dead, how)
    for rank in (0, 2):
        assert outcomes[rank].is_good, outcomes[rank].story()
        text, _ = outcomes[rank].result
        # Rank 2 may also see rank 0 go, which has nothing more to do.
        assert text.startswith("AR050 rank 1 ended") or (rank == 2 and text.startswith("AR050 rank 0"))


def wait_in_vain(folder: str) -> str:
    with allranks.start(folder, timeout_s=1.0) as run:
        model = run.model(nn.Linear(2, 1))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(
            2
        ):  # in the second forward, DDP rebuilds its buckets, which is a collective of the group
            run.step(model(torch.ones(4, 2)).sum())
        if run.rank == 1:
            time.sleep(2.5)
            os._exit(0)
        try:
            run.step(model(torch.ones(4, 2)).sum())
        except CommError as error:
            assert error.code == "AR051", error
            os.write(1, error.what.encode())
            os._exit(0)
    return ""


def test_wait_when_a_rank_does_not_come_then_timeout_names_it(tmp_path: Path) -> None:
    outcomes = run_outcomes(2, wait_in_vain, str(tmp_path), init=False)
    assert "Timed out waiting 1000 ms" in outcomes[0].output and "of rank 1" in outcomes[0].output, outcomes[
        0
    ].story()


def has_core(is_bound: bool) -> bool:
    cores = sorted(os.sched_getaffinity(0))
    assert len(cores) > 1
    os.sched_setaffinity(0, cores[dist.get_rank() % 2 :][:1] if is_bound else cores[:1])
    return opened(1 << 12).counters.has_core


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs a core for each of two ranks")
@pytest.mark.parametrize("is_bound", [True, False])
def test_open_when_each_rank_is_bound_to_a_core_of_its_own_then_it_may_look(is_bound: bool) -> None:
    assert run_ranks(2, has_core, is_bound) == [is_bound] * 2


def refuse(how: str) -> tuple[str, bool]:
    if how == "little memory" and dist.get_rank() == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, resource.RLIM_INFINITY))
    cannot = how == "one rank cannot" and dist.get_rank() == 1
    answer = open_memory(1 << 20, "no such thing" if cannot else "")
    assert isinstance(answer, Refused)
    return answer.reason, answer.is_one_host


def test_open_when_memory_is_short_or_a_rank_cannot_then_all_are_refused_alike() -> None:
    answers = run_ranks(3, refuse, "little memory")
    assert len({reason for reason, _ in answers}) == 1 and "MB of shared memory" in answers[0][0]
    answers = run_ranks(3, refuse, "one rank cannot")
    assert {reason for reason, _ in answers} == {"rank 1: no such thing"}


def insist_on_memory() -> str:
    module = nn.Embedding(4, 2, sparse=True)
    with pytest.raises(CommError) as caught:
        Model(module, torch.device("cpu"), world_size=2, shared_memory=True)
    assert caught.value.code == "AR052"
    Model(module, torch.device("cpu"), world_size=2)  # over the network, without a word
    return caught.value.why


def test_model_when_gradients_are_sparse_then_over_the_network_or_error_if_insisted() -> None:
    assert all("sparse" in why for why in run_ranks(2, insist_on_memory))
