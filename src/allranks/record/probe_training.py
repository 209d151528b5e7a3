"""Marks of a training step: DDP, backward, optimizer, and files written with torch.save."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from allranks.record import compat, models, process, states
from allranks.record import layout as at

_writer, _lines = process.WRITER, process.LINES


def during(phase: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, with `phase` and the user's line in the record while it runs."""

    @functools.wraps(function)
    def marked(*args: Any, **kwargs: Any) -> Any:
        if states.is_other_thread():
            return function(*args, **kwargs)
        before, line = _writer.phase_now, _writer.line_now
        _writer.mark(phase, _lines.here())
        try:
            return function(*args, **kwargs)
        finally:
            _writer.mark(before, line)

    return marked


def mark_files(module: Any) -> None:
    """torch.save and torch.load."""
    for name in ("save", "load"):
        setattr(module, name, during(at.CHECKPOINT, getattr(module, name)))


def mark_backward(module: Any) -> None:
    """torch.autograd.backward, which Tensor.backward calls."""
    backward = module.backward

    @functools.wraps(backward)
    def marked(*args: Any, **kwargs: Any) -> Any:
        if states.is_other_thread():
            return backward(*args, **kwargs)
        before, line = _writer.phase_now, _writer.line_now
        _writer.mark(at.BACKWARD, _lines.here())
        try:
            result = backward(*args, **kwargs)
        except BaseException as error:
            states.communication_failed(error, "backward")
            raise
        finally:
            _writer.mark(before, line)
        replica = states.replica
        if replica is not None:
            _check_gradients(replica)
        return result

    module.backward = marked


def _check_gradients(replica: states.Replica) -> None:
    """Which parameters got no gradient in this backward: known now, before the others wait for them."""
    states.replica = None  # one forward, one check
    unused = compat.unused_parameters(replica.ddp)
    words = _writer.words
    if unused is not None:
        words[at.W_UNUSED] = _writer.string(unused)
        replica.alarms += 1
    elif words[at.W_UNUSED]:
        words[at.W_UNUSED] = 0


def mark_replicas(module: Any) -> None:
    """DistributedDataParallel: its constructor and its forward."""
    torch = sys.modules["torch"]  # not whole yet: torch.compiler is looked up when it is called
    ddp = module.DistributedDataParallel
    build, forward = ddp.__init__, ddp.forward

    @functools.wraps(build)
    def marked_build(self: Any, *args: Any, **kwargs: Any) -> None:
        if states.is_other_thread():
            build(self, *args, **kwargs)
            return
        before, line = _writer.phase_now, _writer.line_now
        _writer.mark(at.BUILD, _lines.here())
        models.describe(args[0] if args else kwargs.get("module"))
        try:
            with states.inside_call():
                build(self, *args, **kwargs)
        finally:
            _writer.mark(before, line)

    @functools.wraps(forward)
    def marked_forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or states.is_other_thread():
            return forward(self, *inputs, **kwargs)
        before, line = _writer.phase_now, _writer.line_now
        _writer.mark(at.FORWARD, _lines.here())
        try:
            result = forward(self, *inputs, **kwargs)
        except BaseException as error:
            states.communication_failed(error, "forward")
            raise
        finally:
            _writer.mark(before, line)
        states.forward_done(self)
        return result

    ddp.__init__, ddp.forward = marked_build, marked_forward


def mark_optimizers(module: Any) -> None:
    """Optimizer.step, by torch's own global hooks."""
    torch = sys.modules["torch"]  # not whole yet: torch.compiler is looked up when it is called
    outer: list[int] = []  # the optimizer whose step goes on: ZeroRedundancyOptimizer steps another inside
    before = [at.PYTHON, 0]

    def enter(optimizer: Any, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling() or states.is_other_thread():
            return
        if outer and _writer.phase_now == at.OPTIMIZER:
            return  # inside another step (an earlier one that raised has left no phase behind)
        outer[:] = (id(optimizer),)
        before[:] = _writer.phase_now, _writer.line_now
        _writer.mark(at.OPTIMIZER)

    def leave(optimizer: Any, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling() or states.is_other_thread() or outer != [id(optimizer)]:
            return
        outer.clear()
        _writer.mark(before[0], before[1])
        if not _writer.is_library_stepped:
            _writer.end_step()
        states.note_step_end()

    module.register_optimizer_step_pre_hook(enter)
    module.register_optimizer_step_post_hook(leave)
