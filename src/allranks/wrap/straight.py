"""How are a small model's gradients averaged without DDP's reducer, which takes as long for it as the backward itself?

DDP is told before each backward that one comes, and then copies every gradient into a bucket, counts, calls the hook, and sorts out what
came back: 0.15 ms for four parameters. Where ranks share memory (comm/memory), and run.step does the backward, all of that is left out: the
gradients are put into this rank's slot when the backward is over, as DDP's hook would have put its buckets there, in the same places.
So ranks need not agree on the way: one may go through DDP in a step that its record looks at, while the others go straight.

What DDP does stays where anything else than run.step begins a backward (`_guard`): it is told in time. So do the first updates (DDP lays
out its buckets then), several models (whose exchanges come in an order that only DDP knows), and steps that the record looks at.

The private names of torch that this needs are all here; where one is missing, everything goes through DDP.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from itertools import repeat
from operator import is_not
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from allranks.comm.memory import MemorySum
from allranks.comm.memory.summing import Part
from allranks.record import probe_training, process

MAX_BYTES = 4 << 20
"""Of all gradients: where they are more, DDP's part of the time is small, and it copies them while they are in the cache."""

_autograd: Any = torch.autograd
_engine: Any = getattr(getattr(_autograd, "Variable", None), "_execution_engine", None)
_is_profiled: Any = getattr(_autograd, "_profiler_enabled", None)
_light = process.WRITER.light
_flatten: Any = getattr(sys.modules.get("torch._utils"), "_flatten_dense_tensors", None)
_of_tensors = torch.Tensor.backward
_NONE = repeat(None)
_expecting: list[weakref.ref[Any]] = []
"""Those whose forward has been, and whose backward DDP knows nothing of yet."""


@dataclass(frozen=True, slots=True, eq=False)
class Bucket:
    """One of DDP's.

    Attributes:
        flat: Its gradients, one after the other.
        parameters: Those they belong to, in that order.
        gradients: The same, each in its shape.
    """

    flat: torch.Tensor
    parameters: list[nn.Parameter]
    gradients: list[torch.Tensor]

    def is_plain(self) -> bool:
        """Whether the order of values in it is that of the parameters' own."""
        size = sum(p.numel() for p in self.parameters)
        return self.flat.numel() == size and all(p.is_contiguous() for p in self.parameters)

    def place(self) -> None:
        """Make the mean the parameters' gradients."""
        for p, gradient in zip(self.parameters, self.gradients, strict=True):
            p.grad = gradient


class Straight:
    """The straight way of one replica.

    Args:
        memory: Where its gradients are averaged.
        replica: DDP's.
        prepare: Tells DDP that a backward comes.
        forward: What DDP's forward calls, given the replica, with the record's marks.
    """

    def __init__(
        self, memory: MemorySum, replica: Any, prepare: Callable[[], None], forward: Callable[..., Any]
    ) -> None:
        self._memory, self._prepare = memory, prepare
        self.forward = functools.partial(forward, replica)
        self._join = vars(replica)["_join_config"]
        self.is_wanted = False  # set once DDP's options are chosen
        self._buckets: list[Bucket] = []
        self._halves: tuple[list[Part], list[Part]] | None = (
            None  # what is written, in each half of the memory
        )
        self._coming: list[Bucket] = []
        self._is_expecting, self._ref = False, weakref.ref(self, _drop)
        self.is_told = False  # DDP expects a backward
        self.run = _marked()
        self._torchs = _autograd.backward

    # -- what DDP does, while that is looked at -----------------------------------------------------------------------------

    @property
    def is_looking(self) -> bool:
        """Whether `note` is to be told of DDP's buckets."""
        return self._halves is None and self.is_wanted

    def note(self, bucket: Any) -> None:
        """DDP's hook has given a bucket to the memory. Ready once the same ones have gone through both halves."""
        self._coming.append(Bucket(bucket.buffer(), list(bucket.parameters()), list(bucket.gradients())))
        if not bucket.is_last():
            return
        buckets, self._coming, before = self._coming, [], self._buckets
        self._buckets = buckets
        flats = [b.flat for b in buckets]
        if len(before) != len(flats) or any(b.flat is not f for b, f in zip(before, flats, strict=True)):
            return
        halves = self._memory.parts_of(0, flats), self._memory.parts_of(1, flats)
        size = sum(f.numel() * f.element_size() for f in flats)
        if halves[0] and halves[1] and size <= MAX_BYTES and all(b.is_plain() for b in buckets):
            self._halves = halves[0], halves[1]
        else:
            self.is_wanted = False

    # -- a forward and its backward -----------------------------------------------------------------------------------------

    def expect(self) -> bool:
        """Before a forward whose backward averages: whether DDP need not be told."""
        if (
            self.is_told
            or self._halves is None
            or (_is_marked() and not _light.is_on)  # the record wants to see what DDP does
            or self._join.enable
            or _is_profiled()
        ):
            self.forget()
            self.is_told = True
            return False
        if not self._is_expecting:
            self._is_expecting = True
            _expecting.append(self._ref)
        return True

    def take(self) -> bool:
        """Whether a backward is expected here; the caller does it, by `run`."""
        if not self._is_expecting or torch.Tensor.backward is not _of_tensors:
            return False
        if _autograd.backward is not self._torchs:  # somebody has put one of his own in its place
            return False
        self._is_expecting = False
        _expecting.remove(self._ref)
        return True

    def forget(self) -> None:
        """The backward will not be a straight one."""
        if self._is_expecting:
            self._is_expecting = False
            _expecting.remove(self._ref)

    def give_to_ddp(self) -> None:
        """Somebody else does the backward: DDP is told now, as it would have been after the forward."""
        if self._is_expecting:
            self.forget()
            self.is_told = True
            self._prepare()

    def average(self) -> list[nn.Parameter]:
        """Put the mean over the ranks into DDP's buckets; `place` makes it the parameters' gradients. **Collective**.

        Returns:
            The parameters that had none on this rank, which count as zeros.

        Raises:
            CommError: AR050, AR051; see MemorySum.add.
        """
        memory, unused = self._memory, []
        assert self._halves is not None
        parts = self._halves[memory.turn]
        had_grad = torch.is_grad_enabled()
        torch.set_grad_enabled(False)
        try:
            for part, bucket in zip(parts, self._buckets, strict=True):
                gradients = [p.grad for p in bucket.parameters]
                if not all(map(is_not, gradients, _NONE)):
                    unused += [p for p in bucket.parameters if p.grad is None]
                    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket.parameters]
                part.write_of(_flatten(gradients))
            memory.finish(parts)
        finally:
            torch.set_grad_enabled(had_grad)
        return unused

    def place(self) -> None:
        """Leave the gradients as DDP's backward leaves them."""
        for bucket in self._buckets:
            bucket.place()

    @property
    def only_bucket(self) -> Bucket | None:
        """Where all gradients lie in one piece."""
        return self._buckets[0] if len(self._buckets) == 1 else None


def _drop(ref: weakref.ref[Any]) -> None:
    """A model is gone whose backward never came."""
    if ref in _expecting:
        _expecting.remove(ref)


def backward_through_memory(
    loss: torch.Tensor, gradient: torch.Tensor, retain_graph: bool, straight: Straight
) -> list[nn.Parameter]:
    """`loss.backward(gradient, ...)`, and the average of its gradients: what `Straight.run` does, marked as a backward. **Collective**."""
    _engine.run_backward((loss,), (gradient,), retain_graph, False, (), True, True)
    return straight.average()


def can_be() -> bool:
    """Whether this torch has what the straight way needs; if so, other backwards are guarded from now on."""
    return None not in (_engine, _flatten, _is_profiled) and _guard()


@functools.cache
def _guard() -> bool:
    """See that DDP is told of each backward that is not a straight one. torch's function beneath all of them, also where somebody has
    imported `torch.autograd.backward` by name."""
    run = getattr(_autograd, "_engine_run_backward", None)
    if run is None:
        return False

    @functools.wraps(run)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        if _expecting and kwargs.get("accumulate_grad") is not False:
            for straight in [ref() for ref in _expecting]:
                if straight is not None:
                    straight.give_to_ddp()
        return run(*args, **kwargs)

    _autograd._engine_run_backward = guarded
    return True


@functools.cache
def _marked() -> Callable[..., list[nn.Parameter]]:
    """`backward_through_memory`, with the record's marks if torch's backward has them."""
    if not _is_marked():
        return backward_through_memory
    holder = SimpleNamespace(backward=backward_through_memory)
    probe_training.mark_backward(holder)
    return holder.backward


@functools.cache
def _is_marked() -> bool:
    code = getattr(torch.autograd.backward, "__code__", None)
    return code is not None and code.co_filename == probe_training.__file__
