"""Do gradients that are sent in other forms, or through memory and one rank of each host, train as they should, and go on exactly?"""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import allranks
from allranks.comm import hosts as comm_hosts
from allranks.comm.memory import opening
from allranks.wrap import memory
from allranks.wrap.wire import METHODS, PowerSgd, make_method
from support.ranks import run_outcomes, run_ranks

pytestmark = pytest.mark.ranks

_SHAPES = [("a", (40, 64)), ("b", (40,)), ("c", (3, 5, 7)), ("d", (64, 48)), ("e", ())]
LAYOUT = [(name, torch.Size(shape)) for name, shape in _SHAPES]
NUMEL = sum(shape.numel() for _, shape in LAYOUT)
# By method, how far the mean may be from the true one, relative to the largest value.
FAR = {"none": 1e-6, "bf16": 2**-7, "fp16": 2**-10, "int8": 2 / 127}


def own(rank: int, step: int) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(100 * step + rank))


def true_mean(step: int) -> torch.Tensor:
    size = dist.get_world_size()
    return torch.stack([own(r, step) for r in range(size)]).double().mean(0)


def average_by_all_methods() -> list[torch.Tensor]:
    """Each method's mean in one update is near the true one; what is held back is sent in the end."""
    out: list[torch.Tensor] = []
    for name in METHODS:
        method = make_method(name, dist.group.WORLD, LAYOUT, 4)
        sent, wanted = torch.zeros(NUMEL, dtype=torch.float64), torch.zeros(NUMEL, dtype=torch.float64)
        for step in range(4):
            flat = own(dist.get_rank(), step)
            method.average(flat)
            out.append(flat)
            sent += flat.double()
            wanted += true_mean(step)
            if name in FAR and step == 0:
                assert (flat - true_mean(step)).abs().max() <= FAR[name] * own(0, 0).abs().max() * 1.5, name
        error = method.take_error()
        if name in ("int8", "powersgd"):
            assert error is not None
            every = [torch.empty_like(error) for _ in range(dist.get_world_size())]
            dist.all_gather(every, error)
            # Nothing is lost: what was sent and the mean of what is held back make what should have been sent.
            torch.testing.assert_close(sent + torch.stack(every).double().mean(0), wanted, rtol=0, atol=1e-4)
        else:
            assert error is None
    return out


@pytest.mark.parametrize("world_size", [2, 3])
def test_methods_when_they_average_then_near_the_mean_and_the_same_bits_everywhere(world_size: int) -> None:
    results = run_ranks(world_size, average_by_all_methods)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def average_what_is_not_finite() -> None:
    for name in ("int8", "powersgd"):
        method = make_method(name, dist.group.WORLD, LAYOUT, 4)
        twin = make_method(name, dist.group.WORLD, LAYOUT, 4)
        for step in range(2):
            method.average(own(dist.get_rank(), step))
            twin.average(own(dist.get_rank(), step))
        bad = own(dist.get_rank(), 2)
        if dist.get_rank() == 1:
            bad[5] = float("inf")
        method.average(bad)
        assert not torch.isfinite(bad).all(), name
        held, before = method.take_error(), twin.take_error()
        assert held is not None and before is not None and torch.equal(held, before), name


def test_methods_when_a_gradient_is_infinite_then_all_see_it_and_nothing_held_is_spoiled() -> None:
    run_ranks(2, average_what_is_not_finite)


def average_low_rank() -> None:
    layout = [("w", torch.Size((64, 48)))]
    method = PowerSgd(dist.group.WORLD, layout, 2)
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(64, 2, generator=generator) @ torch.randn(2, 48, generator=generator)
    flat = (matrix * (dist.get_rank() + 1)).reshape(-1).clone()
    method.average(flat)
    torch.testing.assert_close(flat.view(64, 48), matrix * 1.5, rtol=1e-4, atol=1e-4)


def test_powersgd_when_the_gradient_is_of_its_rank_then_exact() -> None:
    run_ranks(2, average_low_rank)


# -- a whole training --------------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Enough of a matrix that powersgd sends it thin, and a head that is used every other time."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.a, self.b = nn.Linear(32, 64), nn.Linear(64, 48), nn.Linear(48, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(self.body(x).tanh()).tanh())


def data(count: int = 21) -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(count, 32, generator=generator)
    return torch.utils.data.TensorDataset(x, x[:, :4].sum(1, keepdim=True).sin())


def train(folder: str, epochs: int = 2, *, precision: str = "fp32", **settings: Any) -> list[torch.Tensor]:
    """21 samples in batches of 4: uneven shares, windows of two, and a last batch of one sample."""
    settings.setdefault("shared_memory", False)
    with allranks.start(folder, global_batch_size=4, accumulation_steps=2, precision=precision) as run:
        torch.manual_seed(1)
        model = run.model(Net(), **settings)
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), clip_norm=5.0)
        run.save_every(epochs=1)
        loader = run.loader(data(), shuffle=True)
        for _ in run.epochs(epochs):
            for x, y in loader:
                run.step(((model(x) - y) ** 2).mean())
        return [p.detach().clone() for p in model.parameters()]


def same_everywhere(weights: list[torch.Tensor]) -> None:
    for w in weights:
        every = [torch.empty_like(w) for _ in range(dist.get_world_size())]
        dist.all_gather(every, w)
        assert all(torch.equal(every[0], e) for e in every)


# How far weights may be from those of the exact training, after 12 updates at a rate of 0.05.
NEAR = {"none": 1e-5, "bf16": 0.02, "fp16": 0.005, "int8": 0.02, "powersgd": 0.15}


def train_in_all_ways(folder: str) -> None:
    exact = train(f"{folder}/exact")
    same_everywhere(exact)
    for name in METHODS:
        weights = train(f"{folder}/{name}", compress=name)
        same_everywhere(weights)
        for w, e in zip(weights, exact, strict=True):
            assert (w - e).abs().max() <= NEAR[name], (name, (w - e).abs().max())
        # A run of one epoch, gone on with to the end of two: every bit of the run without a break, also where the scale changes.
        precision = "fp16" if name in ("int8", "powersgd") else "fp32"
        whole = train(f"{folder}/{name}-whole", compress=name, precision=precision)
        train(f"{folder}/{name}-broken", 1, compress=name, precision=precision)
        again = train(f"{folder}/{name}-broken", compress=name, precision=precision)
        for w, a in zip(whole, again, strict=True):
            if dist.get_world_size() == 2 or name in ("int8", "powersgd"):
                assert torch.equal(w, a), name
            else:  # sums of three in the order that follows from DDP's buckets, which it makes anew
                assert (w - a).abs().max() <= NEAR[name], name


@pytest.mark.parametrize("world_size", [2, 3])
def test_training_when_sent_in_any_form_then_near_the_exact_one_and_resumes_to_the_bit(
    world_size: int, tmp_path: Path
) -> None:
    run_ranks(world_size, train_in_all_ways, str(tmp_path))


class Branches(nn.Module):
    """Two heads, of which a forward uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.a, self.b = nn.Linear(16, 96), nn.Linear(96, 48), nn.Linear(96, 48)

    def forward(self, x: torch.Tensor, use_b: bool) -> torch.Tensor:
        hidden = self.body(x).relu()
        return self.b(hidden) if use_b else self.a(hidden)


def train_branches(folder: str, name: str, find_unused: bool) -> list[torch.Tensor]:
    """Ranks use different heads, rank 1 gives no loss in one update, and losses are sums with weights."""
    with allranks.start(folder) as run:
        torch.manual_seed(0)
        model = run.model(
            Branches(),
            compress=name,
            shared_memory=False,
            find_unused_parameters=find_unused,
            bucket_cap_mb=0.001,
        )
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), clip_norm=1.0)
        generator = torch.Generator().manual_seed(run.rank)
        for step in range(6):
            x = torch.randn(3 + run.rank, 16, generator=generator)
            if step == 3 and run.rank == 1:
                run.step(None, weight=0)
            else:
                run.step(model(x, (run.rank + step) % 2 == 1).square().mean(1).sum(), weight=len(x))
        return [p.detach().clone() for p in model.parameters()]


def train_branches_in_all_ways(folder: str) -> None:
    warnings.simplefilter("ignore")  # of parameters without a gradient, which the test means
    for find_unused in (False, True):
        exact = train_branches(f"{folder}/{find_unused}", "none", find_unused)
        for name in METHODS[1:]:
            weights = train_branches(f"{folder}/{find_unused}-{name}", name, find_unused)
            same_everywhere(weights)
            for w, e in zip(weights, exact, strict=True):
                assert (w - e).abs().max() <= NEAR[name], (name, find_unused, (w - e).abs().max())


def test_training_when_parameters_losses_and_shares_are_uneven_then_near_the_exact_one(
    tmp_path: Path,
) -> None:
    run_ranks(2, train_branches_in_all_ways, str(tmp_path))


def chosen_in_training(run: Any, model: Any) -> str:
    run.optimizer(torch.optim.SGD(model.parameters(), lr=0.05))
    loader = run.loader(data(), shuffle=True)
    for _ in run.epochs(8):
        for x, y in loader:
            run.step(((model(x) - y) ** 2).mean())
    same_everywhere([p.detach() for p in model.parameters()])
    assert model.exchange is not None and model.exchange.chooser is not None
    return model.exchange.chooser.chosen


def train_with_auto(folder: str, places: str) -> str:
    on_hosts(places)
    with allranks.start(folder, global_batch_size=4) as run:
        torch.manual_seed(1)
        shared: Any = "auto" if len(set(places)) < len(places) else False
        return chosen_in_training(
            run, run.model(Net(), compress="auto", accuracy="any", shared_memory=shared)
        )


@pytest.mark.parametrize("places", ["ab", "aab"])
def test_training_when_auto_chooses_then_all_ranks_alike_and_it_is_written_down(
    places: str, tmp_path: Path
) -> None:
    chosen = run_ranks(len(places), train_with_auto, str(tmp_path), places)
    assert len(set(chosen)) == 1 and chosen[0] in METHODS
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    told = [event for event in events if event["event"] == "compress"]
    assert told and told[-1]["method"] == chosen[0] and told[0]["bytes_per_s"] > 0 and told[0]["delay_s"] > 0


# -- several ranks on each of several hosts ---------------------------------------------------------------------------------------


def on_hosts(places: str) -> None:
    """Let this rank believe that it is on the host of its letter."""
    here = places[dist.get_rank()]
    comm_hosts.network = opening.network = lambda: here


def add_up_on_hosts(places: str, room: int) -> list[torch.Tensor]:
    on_hosts(places)
    hosts = comm_hosts.open_hosts(room)
    assert isinstance(hosts, comm_hosts.Hosts), hosts
    rank, size = dist.get_rank(), dist.get_world_size()
    assert hosts.is_leader == (places.index(places[rank]) == rank)
    out: list[torch.Tensor] = []
    for step in range(3):
        for dtype in (torch.float32, torch.bfloat16):
            tensors = [own(rank, step).to(dtype), own(rank, 10 + step)[:17].to(dtype)]
            hosts.add_up(tensors)
            if hosts.is_leader:
                for t in tensors:
                    dist.all_reduce(t, group=hosts.group)
            hosts.spread(tensors)
            expected = sum(own(r, step).double() for r in range(size))
            assert isinstance(expected, torch.Tensor)
            bound = (1e-5 if dtype == torch.float32 else 0.05) * size
            assert (tensors[0].double() - expected).abs().max() < bound
            out += tensors
    return out


@pytest.mark.parametrize("places", ["aabb", "abba", "aab"])
@pytest.mark.parametrize("room", [100, 1 << 20])
def test_hosts_when_they_add_up_then_the_sum_and_the_same_bits_everywhere(places: str, room: int) -> None:
    results = run_ranks(len(places), add_up_on_hosts, places, room)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def auto_on_one_host(folder: str) -> str:
    """Memory alone is too little here, so hosts are looked for, and there is one."""
    short = opening.Refused("rank 0: too little", is_one_host=False)
    memory.open_memory = lambda num_bytes, reason="": short
    with allranks.start(folder, global_batch_size=12) as run:
        return chosen_in_training(run, run.model(Net(), compress="auto"))


def test_training_when_one_host_has_too_little_memory_then_auto_chooses_for_the_group(tmp_path: Path) -> None:
    chosen = run_ranks(2, auto_on_one_host, str(tmp_path), init=False)
    assert len(set(chosen)) == 1 and chosen[0] in METHODS


def train_on_hosts(folder: str, places: str) -> None:
    exact = train(f"{folder}/exact")
    on_hosts(places)
    for name in METHODS:
        weights = train(f"{folder}/{name}", compress=name, shared_memory="auto", bucket_cap_mb=0.01)
        same_everywhere(weights)
        for w, e in zip(weights, exact, strict=True):
            assert (w - e).abs().max() <= NEAR[name], (name, (w - e).abs().max())


def test_training_when_hosts_have_several_ranks_then_as_without_hosts(tmp_path: Path) -> None:
    run_ranks(3, train_on_hosts, str(tmp_path), "aab")


def lose_a_rank(places: str, who: int) -> str:
    on_hosts(places)
    hosts = comm_hosts.open_hosts(1 << 12)
    assert isinstance(hosts, comm_hosts.Hosts)
    tensor = torch.ones(8)
    for step in range(2):
        if step and dist.get_rank() == who:
            os._exit(3)
        try:
            hosts.add_up([tensor])
            if hosts.is_leader:
                dist.all_reduce(tensor, group=hosts.group)
            hosts.spread([tensor])
        except allranks.AllranksError as error:
            return f"{error.code} {error.what}"
        except RuntimeError as error:
            return f"RuntimeError {error}"
    return "no error"


@pytest.mark.parametrize("who", [0, 1])
def test_hosts_when_a_rank_is_gone_then_those_beside_it_name_it_and_the_others_feel_it(who: int) -> None:
    outcomes = run_outcomes(4, lose_a_rank, "aabb", who)
    beside = outcomes[1 - who].result
    assert beside.startswith(f"AR050 rank {who} ended"), beside
    for rank in (2, 3):
        assert outcomes[rank].result != "no error", outcomes[rank].story()
