"""Is an evaluation on many ranks that of one device: each sample once, in order, nobody waiting, everything put back?"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import allranks
from allranks.core.errors import UsageError
from ranks.reference import net, points
from support.ranks import run_ranks

pytestmark = pytest.mark.ranks


def evaluate(folder: str, num: int, batch: int) -> dict[str, Any]:
    with allranks.start(folder, global_batch_size=batch) as run:
        model = run.model(net())
        loader = run.loader(points(num))
        with run.evaluate(model):
            outputs, seen = [], []
            for x, _ in loader:
                outputs.append(model(x))
                seen += loader.current.positions
        rows = run.gather(outputs)
        names = run.gather([f"sample {p}" for p in seen])
        squares = run.sum(
            ((model(x) - y) ** 2).sum() for x, y in loader
        )  # gradients are on: still no communication
        count = run.sum(len(x) for x, _ in loader)
        mean = run.mean([F.mse_loss(model(x), y) for x, y in loader], weight=[len(x) for x, _ in loader])
        return {"rows": rows, "names": names, "squares": squares, "count": count, "mean": mean}


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize(("num", "batch"), [(45, 10), (9, 4), (3, 8), (1, 1)])
def test_evaluation_then_each_sample_once_in_order(
    tmp_path: Any, world_size: int, num: int, batch: int
) -> None:
    data = points(num)
    with torch.no_grad():
        right = net()(data.tensors[0])
    for mine in run_ranks(world_size, evaluate, str(tmp_path), num, batch, init=False):
        torch.testing.assert_close(mine["rows"], right, rtol=1e-12, atol=1e-12)
        assert mine["names"] == [f"sample {i}" for i in range(num)]
        assert mine["count"] == num
        assert mine["squares"] == pytest.approx(float(((right - data.tensors[1]) ** 2).sum()), rel=1e-12)
        assert mine["mean"] == pytest.approx(float(F.mse_loss(right, data.tensors[1])), rel=1e-12)


def evaluate_on_rank_zero_alone(folder: str) -> int:
    with allranks.start(folder, global_batch_size=8, timeout_s=20) as run:
        model = run.model(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double())
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        loader = run.loader(points(32), shuffle=True)
        seen = 0
        for _ in run.epochs(2):
            for x, y in loader:
                if run.is_rank_zero:
                    with torch.no_grad():
                        for row in points(5).tensors[0]:
                            model.eval()
                            seen += len(model(row[None]))
                        model.train()
                run.step(F.mse_loss(model(x), y))
        return seen


def test_forward_when_only_rank_zero_evaluates_in_the_loop_then_nobody_waits(tmp_path: Any) -> None:
    # C01: DDP's forward broadcasts buffers, so a validation on rank 0 alone hangs; ours communicates nothing there.
    assert run_ranks(2, evaluate_on_rank_zero_alone, str(tmp_path), init=False) == [40, 0]


def modes_around_evaluation(folder: str) -> dict[str, Any]:
    with allranks.start(folder) as run:
        plain = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).double()
        model = run.model(plain)
        plain[1].eval()  # frozen statistics: must still be frozen afterwards
        with run.evaluate(model):
            inside = (plain.training, plain[2].training, torch.is_grad_enabled())
            with pytest.raises(UsageError) as caught:
                run.step(torch.zeros((), requires_grad=True).sum())
        with pytest.raises(ZeroDivisionError), run.evaluate(model):
            raise ZeroDivisionError
        return {
            "inside": inside,
            "after": (plain.training, plain[1].training, plain[2].training, torch.is_grad_enabled()),
            "code": caught.value.code,
        }


def test_evaluate_then_modes_are_switched_and_put_back(tmp_path: Any) -> None:
    for mine in run_ranks(2, modes_around_evaluation, str(tmp_path), init=False):
        assert mine == {"inside": (False, False, False), "after": (True, False, True, True), "code": "AR107"}


def statistics_after_training(folder: str, sync: bool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    with allranks.start(folder, global_batch_size=7) as run:
        torch.manual_seed(0)
        model = run.model(
            nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double(), sync_batchnorm=sync
        )
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        # 22 samples in batches of 7: the last batch has one, which batch norm over all ranks cannot take, as on one device: 21
        loader = run.loader(points(21), shuffle=True)
        for _ in run.epochs(2):
            for x, y in loader:
                run.step(F.mse_loss(model(x), y))
        with run.evaluate(model):
            pass
        return [b.clone() for b in model.buffers()], [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_sync_batchnorm_then_statistics_and_weights_of_one_device(tmp_path: Any, world_size: int) -> None:
    ((buffers, parameters),) = run_ranks(1, statistics_after_training, str(tmp_path), True, init=False)
    for mine in run_ranks(world_size, statistics_after_training, str(tmp_path), True, init=False):
        for a, b in zip(mine[0] + mine[1], buffers + parameters, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_local_batchnorm_when_evaluated_then_rank_zeros_statistics_everywhere(tmp_path: Any) -> None:
    first, second = run_ranks(2, statistics_after_training, str(tmp_path), False, init=False)
    assert all(torch.equal(a, b) for a, b in zip(first[0], second[0], strict=True))


class Codebook(nn.Module):
    """A buffer that the forward changes and the next forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 2).double()
        self.register_buffer("code", torch.zeros(2, dtype=torch.float64))
        self.register_buffer("constant", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.linear(x) + self.code
        self.code.lerp_(out.detach().mean(0), 0.1)
        return out


def codes_in_training(folder: str) -> tuple[list[list[float]], int]:
    with allranks.start(folder, global_batch_size=8) as run:
        model = run.model(Codebook())
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        seen = []
        with pytest.warns(allranks.AllranksWarning, match="AR110 buffer code changes"):
            for x, y in run.loader(points(32), train=True):
                run.step(F.mse_loss(model(x), y))
                seen.append(model.code.tolist())
        return seen, len(model.buffers_sync.changing)


def test_step_when_forward_changes_a_buffer_then_ranks_go_on_with_rank_zeros(tmp_path: Any) -> None:
    first, second = run_ranks(2, codes_in_training, str(tmp_path), init=False)
    assert first == second and first[1] == 1


# -- metrics of other libraries ----------------------------------------------------------------------------------------------


def accuracy_by_torchmetrics(folder: str) -> float:
    torchmetrics = pytest.importorskip("torchmetrics")
    with allranks.start(folder, global_batch_size=4) as run:
        metric = torchmetrics.MeanSquaredError().double()
        metric.set_dtype(torch.float64)
        model = run.model(net())
        with run.evaluate(model):
            for x, y in run.loader(points(9)):
                metric.update(model(x), y)
        return float(metric.compute())


def test_torchmetrics_when_used_unchanged_then_value_of_one_process(tmp_path: Any) -> None:
    data = points(9)
    with torch.no_grad():
        right = float(F.mse_loss(net()(data.tensors[0]), data.tensors[1]))
    for world_size in (1, 2, 3):
        for mine in run_ranks(world_size, accuracy_by_torchmetrics, str(tmp_path), init=False):
            assert mine == pytest.approx(right, rel=1e-9)


# -- deciding together -------------------------------------------------------------------------------------------------------


def stop_on_one_rank(folder: str) -> list[int]:
    with allranks.start(folder) as run:
        seen = []
        for epoch in run.epochs(5):
            seen.append(epoch)
            if run.rank == 1 and epoch == 1:
                run.stop("no progress")
        return seen


def test_stop_when_one_rank_asks_then_all_end_after_the_same_epoch(tmp_path: Any) -> None:
    assert run_ranks(3, stop_on_one_rank, str(tmp_path), init=False) == [[0, 1]] * 3


def leave_a_batch_out(folder: str) -> str:
    with allranks.start(folder, global_batch_size=8, timeout_s=20) as run:
        model = run.model(net())
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        try:
            for x, y in run.loader(points(32), train=True):
                if run.rank == 1 and run.updates == 2:
                    continue
                run.step(F.mse_loss(model(x), y))
        except UsageError as error:
            Path(folder, "code").write_text(error.code)
            os._exit(1)  # as a script ends: its connections break, and nothing else tells rank 0
        except RuntimeError as error:
            return "victim" if "closed" in str(error) or "reset" in str(error) else str(error)
        return "no error"


def test_step_when_one_rank_leaves_a_batch_out_then_that_rank_says_so(tmp_path: Any) -> None:
    assert run_ranks(2, leave_a_batch_out, str(tmp_path), init=False, may_die=[1]) == ["victim", None]
    assert (tmp_path / "code").read_text() == "AR115"
