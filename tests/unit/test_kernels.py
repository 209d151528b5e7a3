"""Does the implementation that an optimizer is given step with the same bits, and does what the user said stay?"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from allranks.core.errors import UsageError
from allranks.train import kernels, snapshot
from allranks.train.slots import OptimizerSlot

_SHAPES = ((7,), (64, 33), (1001,), (10,))


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in _SHAPES]


def stepped(kind: Any, settings: dict[str, Any], *, chosen: bool) -> list[nn.Parameter]:
    """Twelve steps with given gradients; in the third one parameter has none."""
    ps = parameters()
    optimizer = kind(ps, **settings)
    if chosen:
        assert kernels.choose(optimizer)
    generator = torch.Generator().manual_seed(1)
    for step in range(12):
        for p in ps:
            p.grad = torch.randn(p.shape, generator=generator)
        if step == 2:
            ps[1].grad = None
        optimizer.step()
    return ps


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (torch.optim.SGD, {"lr": 0.1}),
        (torch.optim.SGD, {"lr": 0.013, "momentum": 0.9, "weight_decay": 1e-4, "nesterov": True}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "maximize": True}),
        (torch.optim.Adam, {"weight_decay": 0.01}),
        (torch.optim.Adam, {"amsgrad": True}),
        (torch.optim.AdamW, {"lr": 3e-4}),
    ],
)
def test_step_when_implementation_is_chosen_then_same_bits(kind: Any, settings: dict[str, Any]) -> None:
    plain, quick = stepped(kind, settings, chosen=False), stepped(kind, settings, chosen=True)
    assert all(torch.equal(a, b) for a, b in zip(plain, quick, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_step_when_weights_have_16_bits_then_as_torch_steps_by_itself(dtype: torch.dtype) -> None:
    ends: list[torch.Tensor] = []
    for is_offered in (False, True):
        p = nn.Parameter(torch.linspace(-1, 1, 1001).to(dtype))
        optimizer = torch.optim.SGD([p], lr=0.01, momentum=0.9)
        assert not (is_offered and kernels.choose(optimizer))
        for factor in (1.0, -0.3, 0.7):
            p.grad = (torch.linspace(1, 3, 1001) * factor).to(dtype)
            optimizer.step()
        ends.append(p.detach())
    assert torch.equal(*ends)


@pytest.mark.parametrize("said", [{"foreach": False}, {"fused": True}, {"differentiable": True}])
def test_choose_when_the_user_has_chosen_then_it_stays(said: dict[str, bool]) -> None:
    optimizer = torch.optim.SGD(parameters(), lr=0.1, **said)
    before = dict(optimizer.param_groups[0])
    assert not kernels.choose(optimizer)
    assert optimizer.param_groups[0] == before


class Own(torch.optim.SGD):
    """A class of the user's, which may do anything with its groups."""


def test_choose_when_class_or_parameters_are_unusual_then_left_alone() -> None:
    assert not kernels.choose(Own(parameters(), lr=0.1))
    assert not kernels.choose(torch.optim.Adagrad(parameters()))
    assert not kernels.choose(torch.optim.SGD([nn.Parameter(torch.empty(1, device="meta"))], lr=0.1))
    large = nn.Parameter(torch.empty(1).expand(kernels.MAX_BYTES // 4 + 1))
    assert not kernels.choose(torch.optim.SGD([large], lr=0.1))
    sparse = nn.Parameter(torch.ones(3, 2))
    sparse.grad = torch.sparse_coo_tensor(
        torch.tensor([[0]]), torch.ones(1, 2), (3, 2), check_invariants=True
    )
    assert not kernels.choose(torch.optim.SGD([sparse], lr=0.1))


def test_use_fused_when_asked_then_close_to_the_plain_step_and_scaler_knows() -> None:
    ps, other = parameters(), parameters()
    optimizer, plain = torch.optim.AdamW(ps, lr=0.01), torch.optim.AdamW(other, lr=0.01)
    kernels.use_fused(optimizer)
    assert optimizer.param_groups[0]["fused"] and optimizer._step_supports_amp_scaling
    for p, q in zip(ps, other, strict=True):
        p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)
    optimizer.step()
    plain.step()
    for p, q in zip(ps, other, strict=True):
        torch.testing.assert_close(p, q)


def test_use_fused_when_it_cannot_be_then_error_says_why() -> None:
    with pytest.raises(UsageError, match="no fused form"):
        kernels.use_fused(torch.optim.RMSprop(parameters()))
    optimizer = torch.optim.SGD(parameters(), lr=0.1, momentum=0.9)
    for p in optimizer.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    optimizer.step()
    with pytest.raises(UsageError, match="stepped already"):
        kernels.use_fused(optimizer)


class OwnZero(torch.optim.SGD):
    """Counts how often its gradients are forgotten."""

    num_calls = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.num_calls += 1
        super().zero_grad(set_to_none)


def test_forget_gradients_when_class_has_its_own_then_that_is_called() -> None:
    for kind in (torch.optim.SGD, OwnZero):
        ps = parameters()
        optimizer = kind(ps, lr=0.1)
        for p in ps:
            p.grad = torch.ones_like(p)
        kernels.forget_gradients(optimizer)
        assert all(p.grad is None for p in ps)
        assert getattr(optimizer, "num_calls", 1) == 1


def test_clip_when_all_norms_come_in_one_call_then_bits_of_torch() -> None:
    ps, other = parameters(), parameters()
    generator = torch.Generator().manual_seed(2)
    for p, q in zip(ps, other, strict=True):
        p.grad = torch.randn(p.shape, generator=generator)
        q.grad = p.grad.clone()
    slot = OptimizerSlot("optimizer", torch.optim.SGD(ps, lr=0.1))
    norm = slot.clip(0.5, None)
    assert norm is not None and torch.equal(norm, nn.utils.clip_grad_norm_(other, 0.5, foreach=False))
    for p, q in zip(ps, other, strict=True):
        assert p.grad is not None and q.grad is not None and torch.equal(p.grad, q.grad)


def with_a_step(ps: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> OptimizerSlot:
    for p in ps:
        p.grad = torch.ones_like(p)
    slot = OptimizerSlot("optimizer", optimizer)
    slot.take_step(None)
    return slot


@pytest.mark.parametrize("said", [{"fused": True}, {"foreach": False}, {}])
def test_put_optimizer_when_the_saved_one_stepped_in_another_form_then_the_present_one_stays(
    said: dict[str, Any],
) -> None:
    ps = parameters()
    saved = with_a_step(ps, torch.optim.AdamW(ps, lr=0.01))
    assert saved.optimizer.param_groups[0]["foreach"] is True  # chosen by the library
    again = parameters()
    slot = OptimizerSlot("optimizer", torch.optim.AdamW(again, lr=0.5, **said))
    before = {key: slot.optimizer.param_groups[0][key] for key in ("foreach", "fused")}
    snapshot._put_optimizer(slot, saved.optimizer.state_dict(), "somewhere")
    group = slot.optimizer.param_groups[0]
    assert {key: group[key] for key in before} == before and group["lr"] == 0.01
    assert torch.equal(slot.optimizer.state[again[0]]["exp_avg"], saved.optimizer.state[ps[0]]["exp_avg"])
    saved_state = saved.optimizer.state_dict()
    assert saved_state["param_groups"][0]["foreach"] is True  # what was loaded is as it was
    for p in again:
        p.grad = torch.ones_like(p)
    slot.take_step(None)  # and steps with the state that it was given
    assert int(slot.optimizer.state[again[0]]["step"]) == 2
