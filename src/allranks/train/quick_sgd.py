"""How does SGD step on a small model, where torch spends more time on Python around its three additions than on them?

`optimizer.step()` of torch makes lists of parameters, gradients and buffers, sorts them by dtype, looks them up in its state one by one,
and asks about compilers and profilers; on a model of some layers that is two thirds of its time. Here are the calls of its foreach form in
the same order on the same tensors, so the bits are the same, and what is in the optimizer afterwards, too. Anything unusual (a hook, a
profiler, a class or method of the user's, a parameter without gradient, the first step) goes through `optimizer.step()`.

Where all gradients lie one after the other (wrap/straight.py), momentum is kept so, too: one call for all of it. The buffers in the
optimizer's state are pieces of it.

The private names of torch's optimizers that this needs are all here; where one is missing, there is no quick step.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from itertools import repeat
from operator import is_, is_not
from pathlib import Path
from typing import Any

import torch
from torch.optim import SGD

from allranks.wrap.straight import Bucket

of_torch: Any = sys.modules["torch.optim.optimizer"]

_before: Mapping[int, Any] | None = getattr(of_torch, "_global_optimizer_pre_hooks", None)
_after: Mapping[int, Any] | None = getattr(of_torch, "_global_optimizer_post_hooks", None)
_is_profiled: Any = getattr(torch.autograd, "_profiler_enabled", None)
_mul_, _add_, _add = (
    getattr(torch, name, None) for name in ("_foreach_mul_", "_foreach_add_", "_foreach_add")
)
_KNOWN = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_NUMBERS = (float, int)
_NONE = repeat(None)  # to compare a list with, without a call of Python for each element


class QuickSgd:
    """The steps of one SGD that steps with foreach."""

    def __init__(self, optimizer: SGD) -> None:
        self._optimizer = optimizer
        self._torchs: Any = SGD.step
        self._hooks: list[Any] = []  # torch's global ones, all of them the record's, as they were last
        self._whole: Bucket | None = None  # the gradients that the momentum below goes with
        self._momentum: torch.Tensor | None = None
        self._params: list[Any] = []  # of the optimizer, in its order,
        self._pieces: list[Any] = []  # and their pieces of the momentum;
        self._terms: list[Any] = []  # in the order of the gradients
        self._last = 0  # where the last of them lies: `.data = ...` gives a piece another place

    @staticmethod
    def of(optimizer: torch.optim.Optimizer) -> QuickSgd | None:
        """For this optimizer; None if it is another, or this torch is not as expected."""
        is_known = None not in (_before, _after, _is_profiled, _mul_, _add_, _add)
        if type(optimizer) is not SGD or not is_known or not all(hasattr(optimizer, n) for n in _KNOWN):
            return None
        return QuickSgd(optimizer) if _is_torchs(SGD.step) else None

    def step(self) -> bool:
        """Step, if nothing is unusual; whether it did. If not, nothing has happened."""
        optimizer = self._optimizer
        if not self._is_usual(optimizer.__dict__):
            return False
        work = []
        done = 0
        states = list(optimizer.state.values())
        for group in optimizer.param_groups:
            params = group["params"]
            grads = [p.grad for p in params]
            count = len(params)
            if not count or not all(map(is_not, grads, _NONE)) or not _is_plain(group):
                return False
            buffers: list[Any] = []
            if group["momentum"] != 0:
                buffers = [state.get("momentum_buffer") for state in states[done : done + count]]
                if len(buffers) != count or not all(map(is_not, buffers, _NONE)):
                    return False
                done += count
            work.append((group, params, grads, buffers))
        if not self._is_in_order(done):
            return False
        self._do(work)
        return True

    def step_whole(self, whole: Bucket) -> bool:
        """The same with the gradients of `whole`, and no others."""
        optimizer = self._optimizer
        if len(optimizer.param_groups) != 1 or not self._is_usual(optimizer.__dict__):
            return False
        group = optimizer.param_groups[0]
        if group["weight_decay"] != 0 or not _is_plain(group):
            return False
        if self._whole is not whole and not self._take_over(group, whole):
            return False
        params = group["params"]
        if len(params) != len(self._params) or not all(map(is_, params, self._params)):
            self._whole = None
            return False
        momentum, terms = None, whole.gradients
        if group["momentum"] != 0:
            states = optimizer.state
            if len(states) != len(params) or not all(map(is_, states, params)):
                return False
            buffers = [state.get("momentum_buffer") for state in states.values()]
            last = self._pieces[-1].data_ptr() if self._pieces else 0
            if last != self._last or not last or not all(map(is_, buffers, self._pieces)):
                self._whole = None  # another state, or momentum has begun: it is taken over the next time
                return False
            momentum, terms = self._momentum, self._terms
        self._do([(group, whole, momentum, terms)], _step_whole)
        return True

    def _take_over(self, group: dict[str, Any], whole: Bucket) -> bool:
        """Lay the momentum out as the gradients are; whether that can be."""
        params, state = group["params"], self._optimizer.state
        if {id(p) for p in params} != {id(p) for p in whole.parameters} or len(params) != len(
            whole.parameters
        ):
            return False
        self._momentum, self._pieces, self._terms, self._last = None, [], [], 0
        if group["momentum"] != 0:
            olds = [state[p].get("momentum_buffer") if p in state else None for p in whole.parameters]
            known = [old.detach().reshape(-1) for old in olds if old is not None]
            if len(known) != len(olds) or any(k.dtype != whole.flat.dtype or not k.is_cpu for k in known):
                return False
            self._momentum = torch.cat(known)
            pieces = self._momentum.split([p.numel() for p in whole.parameters])
            by_id: dict[int, torch.Tensor] = {}
            self._terms = []
            for p, piece in zip(whole.parameters, pieces, strict=True):
                by_id[id(p)] = state[p]["momentum_buffer"] = piece.view(p.shape)
                self._terms.append(by_id[id(p)])
            self._pieces = [by_id[id(p)] for p in params]
            self._last = self._pieces[-1].data_ptr()
        self._whole, self._params = whole, list(params)
        return True

    def _do(self, work: list[Any], step: Any = None) -> None:
        """The step, with the hooks of the record."""
        optimizer, step = self._optimizer, step or _step
        assert _before is not None and _after is not None
        for hook in _before.values():
            hook(optimizer, (optimizer,), {})
        had_grad = torch.is_grad_enabled()
        torch.set_grad_enabled(False)  # as torch's own step does, without an object for a block
        try:
            for each in work:
                step(*each)
        finally:
            torch.set_grad_enabled(had_grad)
        for hook in _after.values():
            hook(optimizer, (optimizer,), {})

    def _is_usual(self, own: dict[str, Any]) -> bool:
        """Whether `optimizer.step()` would do what torch's SGD does, seen by the record alone."""
        assert _before is not None and _after is not None
        if SGD.step is not self._torchs or _is_profiled():
            return False
        if own["_optimizer_step_pre_hooks"] or own["_optimizer_step_post_hooks"]:
            return False
        patched = own.get("step")
        if patched is not None:
            # A learning-rate scheduler counts the steps in this way.
            if not getattr(patched, "_wrapped_by_lr_sched", False) or patched.__wrapped__ is not self._torchs:
                return False
            own["_opt_called"] = True
        hooks = [*_before.values(), *_after.values()]
        if hooks != self._hooks:
            if not all(getattr(hook, "__module__", "").startswith("allranks.") for hook in hooks):
                return False
            self._hooks = hooks
        return True

    def _is_in_order(self, num_buffers: int) -> bool:
        """Whether the first buffers of the state are those of the parameters with momentum, one after the other."""
        groups: Any = self._optimizer.param_groups
        params = groups[0]["params"]
        if len(groups) > 1:
            params = [p for group in groups if group["momentum"] != 0 for p in group["params"]]
        return not num_buffers or all(map(is_, self._optimizer.state, params))


def _is_torchs(step: Any) -> bool:
    """Whether nobody has put a step of his own in its place, or around it."""
    folder = Path(of_torch.__file__).parent
    while step is not None:
        code = getattr(step, "__code__", None)
        if code is None or Path(code.co_filename).parent != folder:
            return False
        step = getattr(step, "__wrapped__", None)
    return True


def _is_plain(group: dict[str, Any]) -> bool:
    return (
        group["foreach"] is True
        and not group["maximize"]
        and not group["fused"]
        and not group["differentiable"]
        and type(group["lr"]) in _NUMBERS
        and type(group["weight_decay"]) in _NUMBERS
    )


def _step_whole(group: dict[str, Any], whole: Bucket, momentum: Any, terms: list[Any]) -> None:
    """The same, of gradients and momentum in one piece each."""
    assert _add_ is not None
    if momentum is not None:
        momentum.mul_(group["momentum"]).add_(whole.flat, alpha=1 - group["dampening"])
        if group["nesterov"]:
            whole.flat.add_(momentum, alpha=group["momentum"])
            terms = whole.gradients
    _add_(whole.parameters, terms, alpha=-group["lr"])


def _step(group: dict[str, Any], params: list[Any], grads: Any, buffers: list[Any]) -> None:
    """The calls of torch's own foreach form."""
    assert _add_ is not None and _add is not None and _mul_ is not None
    if group["weight_decay"] != 0:
        grads = _add(grads, params, alpha=group["weight_decay"])
    if buffers:
        momentum = group["momentum"]
        _mul_(buffers, momentum)
        _add_(buffers, grads, alpha=1 - group["dampening"])
        if group["nesterov"]:
            _add_(grads, buffers, alpha=momentum)
        else:
            grads = buffers
    _add_(params, grads, alpha=-group["lr"])
