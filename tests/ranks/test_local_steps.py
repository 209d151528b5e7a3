"""Where ranks train apart and meet every few updates: are the weights right, equal at the end, and back after a resume?"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import allranks
from allranks import ckpt
from support.ranks import run_ranks

pytestmark = pytest.mark.ranks


def data(count: int = 22) -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(count, 8, generator=generator)
    return torch.utils.data.TensorDataset(x, x[:, :4].sum(1, keepdim=True).sin())


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def same_everywhere(tensors: list[torch.Tensor]) -> bool:
    for t in tensors:
        every = [torch.empty_like(t) for _ in range(dist.get_world_size())]
        dist.all_gather(every, t)
        if not all(torch.equal(every[0], e) for e in every):
            return False
    return True


def train(
    folder: str,
    epochs: int = 2,
    *,
    save_at: int | None = None,
    momentum: float = 0.0,
    watch: list[Any] | None = None,
    size: int = 4,
    precision: str = "fp32",
    **settings: Any,
) -> list[torch.Tensor]:
    """Batches of 4 and at last of 2 samples, on up to three ranks: uneven shares, and ranks without a sample."""
    with allranks.start(folder, global_batch_size=size, precision=precision) as run:
        model = run.model(net(), shared_memory=False, **settings)
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum))
        run.save_every(steps=save_at, keep=None)
        loader = run.loader(data(), shuffle=True)
        for _ in run.epochs(epochs):
            for x, y in loader:
                run.step(((model(x) - y) ** 2).mean())
                if watch is not None:
                    watch.append(
                        (run.updates, model.is_apart, [p.detach().clone() for p in model.parameters()])
                    )
        return [p.detach().clone() for p in model.parameters()]


def meet_every_update(folder: str) -> None:
    """The mean of weights after plain SGD's steps is the step of the mean gradient: exact weighting survives uneven shares."""
    from allranks.wrap.local import LocalSteps
    from allranks.wrap.settings import LocalSettings

    exact = train(f"{folder}/exact")
    # sync_every=1 means gradients; steps of 2 that meet in between by hand are local steps with a mean after each.
    with allranks.start(f"{folder}/by-hand", global_batch_size=4) as run:
        model = run.model(net(), shared_memory=False, sync_every=1000)
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.05))
        assert isinstance(model.local_steps, LocalSteps) and model.local_steps.settings == LocalSettings(1000)
        for _ in run.epochs(2):
            for x, y in run.loaders.get("loader") or run.loader(data(), shuffle=True):
                run.step(((model(x) - y) ** 2).mean())
                run.synchronize()
        for p, e in zip(model.parameters(), exact, strict=True):
            torch.testing.assert_close(p.detach(), e, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("world_size", [2, 3])
def test_mean_of_weights_when_taken_after_each_update_then_the_step_of_the_mean_gradient(
    world_size: int, tmp_path: Path
) -> None:
    run_ranks(world_size, meet_every_update, str(tmp_path))


def meet_now_and_then(folder: str) -> None:
    for number, outer in enumerate((None, "nesterov")):
        seen: list[Any] = []
        settings = {"sync_every": 5, "outer_optimizer": outer}
        weights = train(f"{folder}/{number}", momentum=0.9, watch=seen, **settings)
        assert [apart for _, apart, _ in seen] == [update % 5 != 0 for update, _, _ in seen]
        for update, apart, then in seen:
            assert same_everywhere(then) == (not apart), update
        assert same_everywhere(weights)  # 12 updates: the end of the run is a meeting, too
        before = net().state_dict().values()
        assert any(not torch.equal(w, b) for w, b in zip(weights, before, strict=True))
        # Saved after 4 and 8 updates, while the ranks are apart, and at the end of the epoch after 6.
        whole = train(f"{folder}/{number}-whole", momentum=0.9, save_at=4, **settings)
        assert all(torch.equal(a, b) for a, b in zip(whole, weights, strict=True))  # a save disturbs nothing
        with allranks.start(
            f"{folder}/{number}-again", resume=f"{folder}/{number}-whole/checkpoints/step-00000008"
        ) as run:
            model = run.model(net(), shared_memory=False, **settings)
            run.optimizer(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
            loader = run.loader(data(), shuffle=True, global_batch_size=4)
            for _ in run.epochs(2):
                for x, y in loader:
                    run.step(((model(x) - y) ** 2).mean())
        again = [p.detach() for p in model.parameters()]
        assert all(torch.equal(a, b) for a, b in zip(whole, again, strict=True)), outer


@pytest.mark.parametrize("world_size", [2, 3])
def test_training_when_ranks_meet_now_and_then_then_equal_there_and_resumed_to_the_bit(
    world_size: int, tmp_path: Path
) -> None:
    run_ranks(world_size, meet_now_and_then, str(tmp_path))


def evaluate_and_save_apart(folder: str) -> None:
    rank = dist.get_rank()
    with allranks.start(folder, global_batch_size=2, precision="fp32") as run:
        model = run.model(nn.Linear(1, 1, bias=False), shared_memory=False, sync_every=100)
        with torch.no_grad():
            model.weight.fill_(1.0)
        run.optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
        ema = run.ema(model, decay=0.5, warmup=False)
        # This rank's gradient is rank + 1, and its weight counts twice on rank 1 only for itself.
        run.step((model(torch.ones(1, 1)) * (rank + 1)).sum() * 3, weight=3)
        own = 1.0 - (rank + 1)
        assert model.is_apart and model.weight.item() == own
        assert ema.module.weight.item() == 1.0  # averages only what all ranks have in common
        with run.evaluate():
            assert model.weight.item() == -0.5  # the mean of 0 and -1
            run.save(blocking=True)
        assert model.weight.item() == own
        run.step(None, weight=0)  # no token on any rank: nothing moves, and nobody is skipped alone
        assert model.weight.item() == own
        run.synchronize()
        assert model.weight.item() == -0.5 and not model.is_apart
    found = ckpt.load(f"{folder}/checkpoints/step-00000001")
    assert found.weights("model")["weight"].item() == -0.5


def test_evaluation_and_save_when_ranks_are_apart_then_of_the_mean(tmp_path: Path) -> None:
    run_ranks(2, evaluate_and_save_apart, str(tmp_path))


def step_outer() -> None:
    """Two meetings of DiLoCo, against its formulas."""
    from allranks.wrap.local import LocalSteps
    from allranks.wrap.settings import LocalSettings

    weight = nn.Parameter(torch.tensor([1.0, 2.0]))
    steps = LocalSteps([("w", weight)], LocalSettings(2, "nesterov", outer_lr=0.5, outer_momentum=0.9))
    anchor, velocity = torch.tensor([1.0, 2.0]), torch.zeros(2)
    for meeting in range(2):
        for _ in range(2):
            with torch.no_grad():
                weight -= 0.1 * (dist.get_rank() + 1 + meeting)
            steps.after_update()
        mean = anchor - 0.2 * (1.5 + meeting)
        difference = anchor - mean
        velocity = difference if meeting == 0 else 0.9 * velocity + difference
        anchor = anchor - 0.5 * (difference + 0.9 * velocity)
        torch.testing.assert_close(weight.detach(), anchor)


def test_outer_step_when_nesterov_then_as_its_formula_says() -> None:
    run_ranks(2, step_outer)


def is_compared() -> list[bool]:
    from allranks.record import compat
    from allranks.wrap.model import Model
    from allranks.wrap.settings import LocalSettings

    models = [
        Model(net(), torch.device("cpu"), world_size=2, shared_memory=False, local=LocalSettings(every))
        for every in (1, 4)
    ]
    return [compat.keeps_equal(m.replica, dist.group.WORLD) for m in models]


def test_record_when_ranks_train_apart_then_their_replicas_are_not_compared() -> None:
    assert run_ranks(2, is_compared) == [[True, False]] * 2


def share_an_optimizer(folder: str) -> list[str]:
    """What is said of one optimizer over a model that trains apart and one that does not, and of two over the first."""
    said: list[str] = []
    for number, is_split in enumerate((False, True)):
        with allranks.start(f"{folder}/{number}", precision="fp32") as run:
            apart = run.model(net(), shared_memory=False, sync_every=3)
            equal = run.model(net(), name="equal", shared_memory=False)
            ps, others = list(apart.parameters()), list(equal.parameters())
            lists = [ps[:2], ps[2:]] if is_split else [ps + others]
            optimizers = [
                run.optimizer(torch.optim.SGD(part, lr=0.1), clip_norm=0.01, name=f"o{i}")
                for i, part in enumerate(lists)
            ]
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(run.rank))
            with pytest.raises(allranks.AllranksError) as caught:
                run.step((apart(x) + equal(x)).square().mean(), optimizer=optimizers[0])
            said.append(f"{caught.value.code} {caught.value.what}; {caught.value.fix}")
    return said


def test_optimizer_when_it_cannot_be_shared_with_a_model_that_trains_apart_then_refused_on_all_ranks(
    tmp_path: Path,
) -> None:
    first, second = run_ranks(2, share_an_optimizer, str(tmp_path))
    assert first == second
    assert first[0].startswith("AR118") and "equal, which has not; an optimizer of its own" in first[0]
    assert first[1].startswith("AR118") and "'o0' and 'o1' both train model" in first[1]


def optimize_each(folder: str) -> None:
    with allranks.start(folder, precision="fp32") as run:
        apart = run.model(net(), shared_memory=False, sync_every=3)
        equal = run.model(net(), name="equal", shared_memory=False)
        both = [
            run.optimizer(torch.optim.SGD(m.parameters(), lr=0.1), clip_norm=0.01, name=f"o{i}")
            for i, m in enumerate((apart, equal))
        ]
        generator = torch.Generator().manual_seed(run.rank)
        for number in range(1, 5):
            for model, optimizer in zip((apart, equal), both, strict=True):
                run.step(model(torch.randn(4, 8, generator=generator)).square().mean(), optimizer=optimizer)
            assert same_everywhere([p.detach() for p in equal.parameters()])
            assert same_everywhere([p.detach() for p in apart.parameters()]) == (number % 3 == 0)


def test_models_when_each_has_its_own_optimizer_then_only_one_trains_apart(tmp_path: Path) -> None:
    run_ranks(2, optimize_each, str(tmp_path))


def set_from_outside(folder: str) -> None:
    asked = train(f"{folder}/asked", sync_every=3)
    with mock.patch.dict(os.environ, {"ALLRANKS_SET": '{"sync_every": 3}'}):
        told = train(f"{folder}/told")
    equal = train(f"{folder}/equal")
    with mock.patch.dict(os.environ, {"ALLRANKS_SET": '{"sync_every": 1}'}):
        undone = train(f"{folder}/undone", sync_every=3, outer_optimizer="nesterov")
    assert all(torch.equal(a, b) for a, b in zip(asked, told, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(equal, undone, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(asked, equal, strict=True))


def test_sync_every_when_the_command_line_gives_it_then_in_place_of_the_scripts(tmp_path: Path) -> None:
    run_ranks(2, set_from_outside, str(tmp_path))


def tail_of_an_epoch(folder: str) -> None:
    """What is kept for an early save at the end of the loop: is the optimizer's state copied for it?"""
    with allranks.start(folder, global_batch_size=4) as run:
        model = run.model(net(), shared_memory=False, sync_every=2)
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
        loader = run.loader(data(16), shuffle=True)
        for _ in run.epochs(1):
            for x, y in loader:
                run.step(((model(x) - y) ** 2).mean())
            assert run._tail is not None
            kept = run._tail.this_rank["optimizers"]["optimizer"]["state"]
            first = next(model.parameters())
            assert kept[0]["momentum_buffer"] is optimizer.state[first]["momentum_buffer"]


def test_end_of_an_epoch_when_ranks_train_apart_then_no_copy_of_the_optimizer(tmp_path: Path) -> None:
    run_ranks(2, tail_of_an_epoch, str(tmp_path), init=False)
