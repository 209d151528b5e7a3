"""Marks of a training step: DDP, backward, optimizer, and files written with torch.save.

These are in the way of every step, so they are written to cost little (bench/watch/in_turn.py): a mark before and after,
nothing looked up that can be kept.
"""

from __future__ import annotations

import functools
import sys
from _thread import get_ident
from collections.abc import Callable
from typing import Any

from allranks.record import compat, fingerprints, losses, models, process, states
from allranks.record import layout as at

_writer, _lines = process.WRITER, process.LINES


def during(phase: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, with `phase` and the user's line in the record while it runs."""

    @functools.wraps(function)
    def marked(*args: Any, **kwargs: Any) -> Any:
        if get_ident() != _writer.owner:
            return function(*args, **kwargs)
        before = _writer.mark(phase | _lines.here())
        try:
            return function(*args, **kwargs)
        finally:
            _writer.mark(before)

    return marked


def mark_files(module: Any) -> None:
    """torch.save and torch.load."""
    for name in ("save", "load"):
        setattr(module, name, during(at.CHECKPOINT, getattr(module, name)))


def mark_backward(module: Any) -> None:
    """torch.autograd.backward, which Tensor.backward calls."""
    backward, writer, here = module.backward, _writer, _lines.watcher()

    @functools.wraps(backward)
    def marked(*args: Any, **kwargs: Any) -> Any:
        if get_ident() != writer.owner:
            return backward(*args, **kwargs)
        before = writer.mark(at.BACKWARD | (line := here()))
        try:
            if not writer.step & losses.mask:
                losses.look(args, line)
            result = backward(*args, **kwargs)
        except BaseException as error:
            states.communication_failed(error, "backward")
            raise
        finally:
            writer.mark(before)
        if states.pending is not None:
            _check_gradients()
        return result

    module.backward = marked


def _check_gradients() -> None:
    """Which parameters got no gradient in this backward: known now, before the others wait for them."""
    replica, states.pending = states.pending, None  # one forward, one check
    if replica is None:
        return
    unused = compat.unused_parameters(replica.check)
    if unused is not None:
        replica.alarms += 1
        replica.check_at_step = states.NEVER if replica.alarms >= states.MAX_ALARMS else 0
        replica.has_unused = True
        _writer.words[at.W_UNUSED] = _writer.string(unused)
    elif replica.has_unused:
        replica.has_unused = False
        _writer.words[at.W_UNUSED] = 0


def mark_replicas(module: Any) -> None:
    """DistributedDataParallel: its constructor and its forward."""
    ddp = module.DistributedDataParallel
    ddp.__init__, ddp.forward = _marked_build(ddp.__init__), _marked_forward(ddp.forward)


def _marked_build(build: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(build)
    def marked(self: Any, *args: Any, **kwargs: Any) -> None:
        if states.is_other_thread():
            build(self, *args, **kwargs)
            return
        before = _writer.mark(at.BUILD | _lines.here())
        models.describe(args[0] if args else kwargs.get("module"))
        try:
            with states.inside_call():
                build(self, *args, **kwargs)
        finally:
            _writer.mark(before)

    return marked


def _marked_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
    torch = sys.modules["torch"]  # not whole yet: what is needed of it is looked up when it is called
    writer, here, replicas = _writer, _lines.watcher(), states.replicas

    @functools.wraps(forward)
    def marked(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        if get_ident() != writer.owner:
            return forward(self, *inputs, **kwargs)
        before = writer.mark(at.FORWARD | here())
        try:
            result = forward(self, *inputs, **kwargs)
        except BaseException as error:
            states.communication_failed(error, "forward")
            raise
        finally:
            writer.mark(before)
        if torch.is_grad_enabled():  # gradients are to come: one micro-step more
            writer.words[at.W_MICRO_STEP] += 1
            states.is_synchronised = self.require_backward_grad_sync
            replica = replicas.get(id(self)) or states.Replica(self)
            if writer.step >= replica.check_at_step:
                states.expect_gradients(replica, self)
        return result

    return compat.let_dynamo_see(marked, forward)


def mark_optimizers(module: Any) -> None:
    """Optimizer.step, by torch's own global hooks."""
    writer = _writer
    outer: Any = None  # the optimizer whose step goes on: ZeroRedundancyOptimizer steps another inside
    before = at.PYTHON

    def enter(optimizer: Any, args: Any, kwargs: Any) -> None:
        nonlocal outer, before
        if get_ident() != writer.owner:
            return
        if outer is None or writer.words[at.W_PHASE] != at.OPTIMIZER:  # or an earlier step raised
            outer = optimizer
            before = writer.mark(at.OPTIMIZER)

    def leave(optimizer: Any, args: Any, kwargs: Any) -> None:
        nonlocal outer
        if outer is not optimizer:
            return
        outer = None
        writer.mark(before)
        if writer.is_library_stepped:
            step = writer.step + 1  # the library says so in a moment
        elif (step := writer.end_step()) >= states.next_note_step:
            states.note_step_end()
        if step >= fingerprints.next_step or not states.is_synchronised:
            fingerprints.take(step, is_in_backward=before & 0xFF == at.BACKWARD)

    def nothing(optimizer: Any, args: Any, kwargs: Any) -> None:
        """What a compiled optimizer calls."""

    module.register_optimizer_step_pre_hook(compat.let_dynamo_see(enter, nothing))
    module.register_optimizer_step_post_hook(compat.let_dynamo_see(leave, nothing))
