"""Marks of a training step: DDP, backward, optimizer (files.py has torch.save).

Most of quick steps have light marks (light.py): while `writer.light` is there a mark is a store of the phase before and one after, with
the line that called last; the tick thread looks for the line of a step that does not end. These few lines stand in each mark, since
where nothing of ours is in the processor's cache a Python call costs as much as they do.
"""

from __future__ import annotations

import functools
import sys
from _thread import get_ident
from collections.abc import Callable
from sys import _getframe
from time import monotonic_ns
from typing import Any

from allranks.record import (
    averaging,
    compat,
    fingerprints,
    gradients,
    losses,
    models,
    origin,
    process,
    replicas,
    states,
)
from allranks.record import layout as at
from allranks.record.layout import BACKWARD, FORWARD, OPTIMIZER, W_MICRO_STEP, W_PHASE, W_SINCE_NS

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


def mark_backward(module: Any) -> None:
    """torch.autograd.backward, which Tensor.backward calls."""
    backward, writer, line = module.backward, _writer, 0

    @functools.wraps(backward)
    def marked(*args: Any, **kwargs: Any) -> Any:
        nonlocal line
        if get_ident() != writer.owner:
            return backward(*args, **kwargs)
        begin = 0
        if (light := writer.light) is not None:
            words, before = light, light[W_PHASE]
            words[W_PHASE] = BACKWARD | line
        else:
            line = _lines.here()
            before, words = writer.mark(BACKWARD | line), writer.words
            begin = words[W_SINCE_NS]
            if losses.is_due():
                losses.look(args, line)
        try:
            result = backward(*args, **kwargs)
        except BaseException as error:
            states.communication_failed(error, "backward")
            raise
        finally:
            if light is not None and writer.light is not None:
                words[W_PHASE] = before
            else:  # or light marks were ended meanwhile
                writer.mark(before)
        if light is None and (states.pending is not None or writer.is_timed):
            _after_backward(begin, words[W_SINCE_NS])
        return result

    module.backward = marked


def _after_backward(begin: int, end: int) -> None:
    """Of steps that are timed, and where gradients are to be looked at. Never raises."""
    if _writer.is_timed:
        _writer.times[at.M_BACKWARD_FROM], _writer.times[at.M_BACKWARD_TO] = begin, end
        gradients.settle()
    replica, states.pending = states.pending, None  # one forward, one check
    try:
        if replica is not None:
            _check_gradients(replica)
    except Exception as error:  # noqa: BLE001 - a DDP that is not as expected
        compat.step_aside("which parameters got no gradient", error)


def _check_gradients(replica: states.Replica) -> None:
    """Which parameters got no gradient in this backward: known now, before the others wait for them."""
    if _writer.is_timed:
        _note_exchange(replica)
    if _writer.step < replica.check_at_step:
        return
    replica.check_at_step = _writer.step + (16 if states.is_quick else 1)
    unused = compat.unused_parameters(replica.check)
    if unused is not None:
        replica.alarms += 1
        replica.check_at_step = states.NEVER if replica.alarms >= states.MAX_ALARMS else 0
        replica.has_unused = True
        _writer.words[at.W_UNUSED] = _writer.string(unused)
    elif replica.has_unused:
        replica.has_unused = False
        _writer.words[at.W_UNUSED] = 0


def _note_exchange(replica: states.Replica) -> None:
    """When the last gradient came: DDP counts from the end of its forward (measured: 0.1 to 0.4 ms before ours)."""
    ddp, times = replica.ddp(), _writer.times
    ready_ns = compat.ready_after_ns(ddp) if ddp is not None else 0
    if ready_ns <= 0 or ready_ns == replica.ready_ns:
        return  # not known, or of an earlier backward
    replica.ready_ns = ready_ns
    begin, end = times[at.M_BACKWARD_FROM], times[at.M_BACKWARD_TO]
    ready = min(max(times[at.M_FORWARD_TO] + ready_ns, begin), end)
    times[at.M_READY] = ready
    _writer.exchanged_ns += end - ready
    _writer.exchanged_steps = count = _writer.exchanged_steps + 1
    if ddp is not None and not ddp.require_backward_grad_sync:
        replicas.uncovered(replica, _lines.here)
    if count & 3 == 0:
        replicas.look(replica, ddp, count)


def mark_replicas(module: Any) -> None:
    """DistributedDataParallel: its constructor, its forward, and the exchange of buffers in it."""
    ddp = module.DistributedDataParallel
    ddp.__init__, ddp.forward = _marked_build(ddp.__init__), marked_forward(ddp.forward)
    name = compat.buffers_exchange(ddp)
    if name is not None:
        setattr(ddp, name, _timed_buffers(getattr(ddp, name)))


def _timed_buffers(exchange: Callable[..., Any]) -> Callable[..., Any]:
    """Where buffers are exchanged in forward, a rank waits there for rank 0."""
    writer, times = _writer, _writer.times

    @functools.wraps(exchange)
    def timed(*args: Any, **kwargs: Any) -> Any:
        if get_ident() != writer.owner:
            return exchange(*args, **kwargs)
        begin = monotonic_ns()
        try:
            return exchange(*args, **kwargs)
        finally:
            times[at.M_BUFFERS_FROM], times[at.M_BUFFERS_TO] = begin, (end := monotonic_ns())
            writer.buffers_ns += end - begin

    return compat.let_dynamo_see(timed, exchange)


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
        averaging.built(self)

    return marked


def marked_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward` of DDP, or what stands for it, with its marks."""
    torch = sys.modules["torch"]  # not whole yet
    is_grad_enabled = getattr(torch, "is_grad_enabled", None) or (lambda: torch.is_grad_enabled())
    writer, line = _writer, 0

    @functools.wraps(forward)
    def marked(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        nonlocal line
        if get_ident() != writer.owner:
            return forward(self, *inputs, **kwargs)
        begin = 0
        light = writer.light
        is_light = light is not None and is_grad_enabled() and id(self) == states.newest
        if light is not None and is_light:
            words, before = light, light[W_PHASE]
            words[W_PHASE] = FORWARD | line
        else:
            line = _lines.here()
            before, words = writer.mark(FORWARD | line), writer.words
            begin = words[W_SINCE_NS]
        try:
            result = forward(self, *inputs, **kwargs)
        except BaseException as error:
            states.communication_failed(error, "forward")
            raise
        finally:
            if is_light and writer.light is not None:
                words[W_PHASE] = before
            else:  # or light marks were ended meanwhile
                writer.mark(before)
        if is_light or is_grad_enabled():  # gradients are to come: one micro-step more
            words[W_MICRO_STEP] += 1
            if self.require_backward_grad_sync:
                states.syncs += 1
                states.is_synchronised = True
            else:
                states.is_synchronised = False
            if not is_light and (writer.is_looked or id(self) != states.newest):
                _look(self, inputs, result, begin, words[W_SINCE_NS])
        else:  # evaluation, whatever the script calls it
            spent = words[W_SINCE_NS] - begin
            writer.moved_ns[FORWARD] -= spent
            writer.moved_ns[at.EVALUATE] += spent
        return result

    return compat.let_dynamo_see(marked, forward)


def _look(ddp: Any, inputs: tuple[Any, ...], result: Any, begin: int, end: int) -> None:
    """After a forward of a step that is looked at. Never raises."""
    if _writer.is_timed:
        _writer.times[at.M_FORWARD_FROM], _writer.times[at.M_FORWARD_TO] = begin, end
    try:
        states.newest = id(ddp)
        replica = states.replicas.get(id(ddp)) or _used_first(ddp)
        replica.syncs += ddp.require_backward_grad_sync
        if not replica.syncs:
            states.newest = 0  # looked at in each forward, until one whose backward averages
        gradients.prepare()
        origin.remember(ddp, inputs, result)
        if _writer.step >= replica.check_at_step or _writer.is_timed:
            states.expect_gradients(replica, ddp)
    except Exception as error:  # noqa: BLE001 - a DDP that is not as expected
        compat.step_aside("what a DistributedDataParallel was given", error)


def _used_first(ddp: Any) -> states.Replica:
    """A DDP is called for the first time."""
    gradients.watch(ddp)
    return states.Replica(ddp)


def _is_inside_another() -> bool:
    """Whether what calls our hook, torch's wrapper of an optimizer's step, is on the stack once more."""
    frame: Any = _getframe(2)
    code, frame = frame.f_code, frame.f_back
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None


def mark_optimizers(module: Any) -> None:
    """Optimizer.step, by torch's own global hooks."""
    writer = _writer
    outer: Any = None  # the optimizer whose step goes on: ZeroRedundancyOptimizer steps another inside
    before = at.PYTHON

    def enter(optimizer: Any, args: Any, kwargs: Any) -> None:
        nonlocal outer, before
        if get_ident() != writer.owner:
            return
        if gradients.bad_at >= 0:
            gradients.stepping()
        words = writer.words
        if (
            outer is None or words[W_PHASE] != OPTIMIZER or not _is_inside_another()
        ):  # or an earlier step raised
            outer, before = optimizer, words[W_PHASE]
            if before == OPTIMIZER:  # it did, and the mark was left
                before = at.PYTHON
            if writer.light is not None:
                words[W_PHASE] = OPTIMIZER
                return
            writer.mark(OPTIMIZER)
            if writer.is_timed:
                writer.times[at.M_OPTIMIZER_FROM] = words[W_SINCE_NS]

    def leave(optimizer: Any, args: Any, kwargs: Any) -> None:
        nonlocal outer
        if outer is not optimizer:
            return
        outer = None
        words, end = writer.words, 0
        if writer.light is not None:
            words[W_PHASE] = before
        else:
            writer.mark(before)
            end = words[W_SINCE_NS]
        if writer.is_library_stepped:
            step = writer.step + 1  # the library says so in a moment
        elif (step := writer.end_step(end)) >= states.next_note_step:
            states.note_step_end()
            averaging.look()
        if states.syncs >= fingerprints.next_step or not states.is_synchronised:
            is_inside = before & 0xFF == BACKWARD
            fingerprints.take(states.syncs, is_in_backward=is_inside, optimizer=optimizer, num_steps=step)

    def nothing(optimizer: Any, args: Any, kwargs: Any) -> None:
        """What a compiled optimizer calls."""

    module.register_optimizer_step_pre_hook(compat.let_dynamo_see(enter, nothing))
    module.register_optimizer_step_post_hook(compat.let_dynamo_see(leave, nothing))
