"""Does a wrapped model behave as the plain one: names, copies, precision, averages, learning rates?"""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import allranks
from allranks.core.errors import RanksDisagree, UsageError
from ranks.reference import assert_close, net, order_of, points
from support.ranks import run_ranks

pytestmark = pytest.mark.ranks


def looks_plain(folder: str) -> None:
    with allranks.start(folder) as run:
        plain = net()
        plain.note = "mine"
        plain.backward = plain.take = lambda: "its own"  # who trains by hand has such methods
        model = run.model(plain)
        names = [n for n, _ in plain.named_parameters()]
        assert [n for n, _ in model.named_parameters()] == names
        assert list(model.state_dict()) == list(plain.state_dict())
        assert [n for n, _ in model.named_modules()] == [n for n, _ in plain.named_modules()]
        assert run.module(model) is plain and model.module is plain and model.note == "mine"
        assert model.backward() == model.take() == "its own"
        del plain.backward, plain.take
        model.load_state_dict(net(1).state_dict())
        assert torch.equal(plain[0].weight, net(1)[0].weight)
        twin = copy.deepcopy(model)  # C55: a process group cannot be copied; a target network must be plain
        assert type(twin) is nn.Sequential and torch.equal(twin[0].weight, plain[0].weight)
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        assert type(torch.load(buffer, weights_only=False)) is nn.Sequential
        with pytest.raises(AttributeError):
            _ = model.nothing_of_this_name
        for again in (model, plain):
            with pytest.raises(UsageError) as caught:
                run.model(again)
            assert caught.value.code == "AR112"


@pytest.mark.parametrize("world_size", [1, 2])
def test_model_when_wrapped_then_looks_plain(tmp_path: Any, world_size: int) -> None:
    run_ranks(world_size, looks_plain, str(tmp_path), init=False)


def build_different(folder: str, how: str) -> str:
    with allranks.start(folder) as run:
        width = 8 + (how == "shape") * run.rank
        module = nn.Sequential(nn.Linear(6, width), nn.Linear(width, 2))
        if run.rank == 2:
            if how == "dtype":
                module[1].double()
            if how == "more":
                module.append(nn.Linear(2, 2))
            if how == "frozen":
                module[0].bias.requires_grad_(False)
        with pytest.raises(RanksDisagree) as caught:
            run.model(module)
        assert caught.value.code == "AR280"
        return caught.value.what


@pytest.mark.parametrize(
    ("how", "difference"),
    [
        (
            "shape",
            "rank 0 has parameter 0.weight [8, 6] float32 trainable, rank 1 has parameter 0.weight [9, 6]",
        ),
        (
            "dtype",
            "rank 0 has parameter 1.weight [2, 8] float32 trainable, rank 2 has parameter 1.weight [2, 8] float64",
        ),
        ("more", "only rank 2 has parameter 2.weight [2, 2]"),
        (
            "frozen",
            "rank 0 has parameter 0.bias [8] float32 trainable, rank 2 has parameter 0.bias [8] float32 frozen",
        ),
    ],
)
def test_model_when_ranks_built_different_ones_then_first_difference_is_named(
    tmp_path: Any, how: str, difference: str
) -> None:
    for what in run_ranks(3, build_different, str(tmp_path), how, init=False):
        assert difference in what


def compiled_names(folder: str) -> list[str]:
    with allranks.start(folder) as run:
        model = run.model(torch.compile(net()))
        return list(model.state_dict())


def test_model_when_compiled_then_names_are_plain(tmp_path: Any) -> None:
    assert run_ranks(1, compiled_names, str(tmp_path), init=False) == [list(net().state_dict())]


# -- precision ---------------------------------------------------------------------------------------------------------------


class Watching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(6, 2)
        self.inside: torch.dtype | None = None

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.linear(x)
        self.inside = out.dtype
        return {"out": out}


def half_forward(folder: str, precision: str) -> tuple[str, str, str]:
    with allranks.start(folder, precision=precision) as run:
        model = run.model(Watching())
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        x, y = (t.float() for t in points(8).tensors)
        out = model(x)["out"]
        run.step(F.mse_loss(out, y))
        return str(model.inside), str(out.dtype), str(model.linear.weight.dtype)


@pytest.mark.parametrize(
    ("precision", "inside"),
    [("bf16", "torch.bfloat16"), ("fp16", "torch.float16"), ("fp32", "torch.float32")],
)
def test_precision_then_forward_is_half_and_the_rest_float32(
    tmp_path: Any, precision: str, inside: str
) -> None:
    for mine in run_ranks(2, half_forward, str(tmp_path), precision, init=False):
        assert mine == (inside, "torch.float32", "torch.float32")


def overflow_on_one_rank(folder: str) -> tuple[list[bool], list[float], float, int]:
    with allranks.start(folder, precision="fp16") as run:
        model = run.model(Watching())
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        ticks = run.scheduler(torch.optim.lr_scheduler.StepLR(optimizer, 1))
        x, y = (t.float() for t in points(8).tensors)
        skipped = []
        for step in range(3):
            loss = F.mse_loss(model(x)["out"], y)
            update = run.step(loss * float("inf") if run.rank == 1 and step == 1 else loss)
            skipped.append(update.skipped)
        return (
            skipped,
            model.linear.weight.flatten().tolist(),
            run.precision.scaler.get_scale(),
            ticks.last_epoch,
        )


def test_fp16_when_one_rank_overflows_then_all_skip_the_update(tmp_path: Any) -> None:
    first, second = run_ranks(2, overflow_on_one_rank, str(tmp_path), init=False)
    assert first == second
    assert (
        first[0] == [False, True, False] and first[2] == 2.0**15 and first[3] == 2
    )  # a scheduler counts updates


# -- averages and learning rates ---------------------------------------------------------------------------------------------


def averaged(folder: str) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    with allranks.start(folder, global_batch_size=8) as run:
        model = run.model(
            nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double(), sync_batchnorm=True
        )
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        ema = run.ema(model, decay=0.9)
        for _ in run.epochs(2):
            for x, y in run.loader(points(32), train=True):
                run.step(F.mse_loss(model(x), y))
        before = [t.clone() for t in model.state_dict().values()]
        with run.evaluate(model, ema=ema):
            inside = [t.clone() for t in model.state_dict().values()]
        after = [t.clone() for t in model.state_dict().values()]
        assert list(ema.state_dict()["module"]) == list(model.state_dict())  # C44: names are plain
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        assert not torch.equal(before[0], inside[0])
        return before, inside, [t.clone() for t in ema.state_dict()["module"].values()]


def test_ema_then_same_on_any_number_of_ranks_and_swapped_for_evaluation(tmp_path: Any) -> None:
    (right,) = run_ranks(1, averaged, str(tmp_path), init=False)
    for mine in run_ranks(2, averaged, str(tmp_path), init=False):
        assert all(torch.equal(a, b) for a, b in zip(mine[1], mine[2], strict=True))
        assert_close([t.double() for t in mine[1]], [t.double() for t in right[1]], 1e-9)


def rates(folder: str) -> tuple[list[float], list[float]]:
    with allranks.start(folder, global_batch_size=16) as run:
        model = run.model(net())
        lr = run.scale_lr(0.1, base_batch_size=4, rule="linear", warmup_steps=4)
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=lr))
        run.scheduler(torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5))
        used, after = [], []
        optimizer.register_step_pre_hook(lambda opt, args, kwargs: used.append(opt.param_groups[0]["lr"]))
        for x, y in run.loader(points(96), train=True):
            run.step(F.mse_loss(model(x), y))
            after.append(optimizer.param_groups[0]["lr"])
        assert type(optimizer.param_groups[0]["lr"]) is float
        return used, after


@pytest.mark.parametrize("world_size", [1, 2])
def test_scale_lr_and_schedulers_then_once_per_update_on_any_number_of_ranks(
    tmp_path: Any, world_size: int
) -> None:
    # C37: a scheduler goes one step per update, not one per rank
    for used, after in run_ranks(world_size, rates, str(tmp_path), init=False):
        assert used == pytest.approx([0.1, 0.2, 0.3, 0.2, 0.2, 0.2])
        assert after == pytest.approx([0.4, 0.4, 0.2, 0.2, 0.2, 0.1])


def clipped(folder: str) -> tuple[list[float], list[torch.Tensor]]:
    with allranks.start(folder, global_batch_size=8, accumulation_steps=2) as run:
        model = run.model(net())
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), clip_norm=0.05, clip_value=0.03)
        norms = []
        for x, y in run.loader(points(32), shuffle=True):
            update = run.step(F.mse_loss(model(x), y))
            if update is not None:
                norms.append(float(update.grad_norm))
        return norms, [p.detach().clone() for p in model.parameters()]


def test_clipping_then_norm_and_weights_of_one_device(tmp_path: Any) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    norms = []
    order = order_of(32, 0, 0)
    for first in range(0, 32, 8):
        x, y = points(32)[order[first : first + 8]]
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.03)
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.05)))
        optimizer.step()
    for mine in run_ranks(2, clipped, str(tmp_path), init=False):
        assert mine[0] == pytest.approx(norms, rel=1e-11)
        assert_close(mine[1], [p.detach() for p in model.parameters()])


def misuse(folder: str) -> list[str]:
    codes = []

    def refused(call: Any) -> None:
        with pytest.raises(UsageError) as caught:
            call()
        codes.append(caught.value.code)

    with allranks.start(folder) as run:
        model = run.model(net())
        refused(lambda: run.step(torch.zeros((), requires_grad=True)))
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        out = model(points(4).tensors[0])
        refused(lambda: run.step(out))
        refused(lambda: run.step(3.0))
        refused(lambda: run.step(out.sum().detach()))
        refused(lambda: run.step(torch.zeros((), requires_grad=True, device="meta") * 1))
        refused(lambda: run.step(out.sum(), weight=-1))
        refused(lambda: run.step(out.sum(), optimizer=torch.optim.SGD(model.parameters(), lr=0.1)))
        refused(lambda: run.optimizer(optimizer, clip_norm=0))
        refused(lambda: run.scheduler(torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)))
        refused(lambda: run.scale_lr(0.1, base_batch_size=4))
        refused(lambda: run.ema(model, decay=1.0))
    refused(lambda: run.step(out.sum()))
    return codes


def test_step_when_used_wrongly_then_each_has_its_code(tmp_path: Any) -> None:
    expected = [
        "AR105",
        "AR101",
        "AR101",
        "AR102",
        "AR103",
        "AR106",
        "AR105",
        "AR108",
        "AR113",
        "AR114",
        "AR109",
        "AR100",
    ]
    assert run_ranks(1, misuse, str(tmp_path), init=False) == [expected]
