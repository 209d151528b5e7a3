"""Marks of a training step: DDP, backward, optimizer (files.py has torch.save).

Most of quick steps have light marks (light.py): while `light.is_on` a mark only counts, and ends as a whole one if something has ended
them meanwhile. These few lines stand in each mark, since where nothing of ours is in the processor's cache all that is touched costs.
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
    compiling,
    counts,
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
from allranks.record.layout import (
    BACKWARD,
    FORWARD,
    OPTIMIZER,
    PYTHON,
    W_MICRO_STEP,
    W_PHASE,
    W_SINCE_NS,
)
from allranks.record.light import is_within, stands_for

_writer, _lines = process.WRITER, process.LINES
_light = _writer.light
# What cannot go on where an optimizer steps: one whose step raised left its mark, or the tick thread ended light marks so late that the
# call it had seen was over.
_LEFT = (OPTIMIZER, FORWARD, at.DATA)


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
    backward, light = module.backward, _light

    @functools.wraps(backward)
    def marked_backward(*args: Any, **kwargs: Any) -> Any:
        if light.is_on:
            try:
                return backward(*args, **kwargs)
            except BaseException as error:
                states.raised(error, "backward")
                raise
            finally:
                if not light.is_on:
                    resume()
        return _backward(backward, args, kwargs)

    stands_for(BACKWARD, marked_backward, backward)
    module.backward = counts.quicken(
        marked_backward, counts.BACKWARD, light, backward, lambda e, _: states.raised(e, "backward"), resume
    )  # fmt: skip


def resume() -> None:
    """Light marks were ended during the call that has just come back."""
    if get_ident() == _writer.owner:
        _writer.mark(PYTHON)


def _backward(backward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """With whole marks."""
    if get_ident() != _writer.owner:
        return backward(*args, **kwargs)
    line = _lines.here(3)
    before = _writer.mark(BACKWARD | line)
    begin = _writer.words[W_SINCE_NS]
    is_inner = before & 0xFF == BACKWARD  # of a checkpoint that computes anew: the whole one goes on
    if losses.is_due() and not is_inner:
        losses.look(args, line)
    result = _until_done("backward", before, backward, *args, **kwargs)
    if (states.pending is not None or _writer.is_timed) and not is_inner:
        _after_backward(begin, _writer.words[W_SINCE_NS])
    return result


def _until_done(what: str, before: int, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """A call whose mark is set; then what was before is marked again."""
    try:
        return call(*args, **kwargs)
    except BaseException as error:
        states.raised(error, what)
        raise
    finally:
        _writer.mark(before)


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
    ready_ns = compat.ready_after_ns(replica.stats)
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

    return compiling.let_dynamo_see(timed, exchange)


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
    light = _light

    @functools.wraps(forward)
    def marked_forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        if light.is_on and id(self) == light.model and is_grad_enabled():
            try:
                result = forward(self, *inputs, **kwargs)
            except BaseException as error:
                states.raised(error, "forward")
                raise
            finally:
                if not light.is_on:
                    resume()
            light.micro_steps = light.step_words[1] = light.micro_steps + 1
            if self.require_backward_grad_sync:
                light.syncs += 1
            else:
                unsynchronised()
            return result
        return _forward(forward, self, inputs, kwargs)

    def unsynchronised() -> None:
        states.is_synchronised, light.until_syncs = False, 0

    stands_for(FORWARD, marked_forward, forward)
    marked = counts.quicken(
        marked_forward, counts.FORWARD, light, forward, lambda e, _: states.raised(e, "forward"), resume,
        is_grad_enabled=is_grad_enabled, unsynchronised=unsynchronised,
    )  # fmt: skip
    return compiling.let_dynamo_see(marked, forward)


def _forward(forward: Callable[..., Any], ddp: Any, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """With whole marks."""
    if get_ident() != _writer.owner:
        return forward(ddp, *inputs, **kwargs)
    if _light.is_on:
        _writer.end_light(monotonic_ns(), _getframe(1).f_back)
    before = _writer.mark(FORWARD | _lines.here(3))
    begin = _writer.words[W_SINCE_NS]
    result = _until_done("forward", before, forward, ddp, *inputs, **kwargs)
    end = _writer.words[W_SINCE_NS]
    if not sys.modules["torch"].is_grad_enabled():  # evaluation, whatever the script calls it
        _writer.moved_ns[FORWARD] -= end - begin
        _writer.moved_ns[at.EVALUATE] += end - begin
        return result
    _light.micro_steps += 1  # gradients are to come
    _writer.words[W_MICRO_STEP] = _light.micro_steps
    states.is_synchronised = ddp.require_backward_grad_sync
    _light.syncs += states.is_synchronised
    if _writer.is_looked or id(ddp) != _light.model:
        _look(ddp, inputs, result, begin, end)
    return result


def _look(ddp: Any, inputs: tuple[Any, ...], result: Any, begin: int, end: int) -> None:
    """After a forward of a step that is looked at. Never raises."""
    if _writer.is_timed:
        _writer.times[at.M_FORWARD_FROM], _writer.times[at.M_FORWARD_TO] = begin, end
    try:
        _light.model = id(ddp)
        replica = states.replicas.get(id(ddp)) or _used_first(ddp)
        replica.syncs += ddp.require_backward_grad_sync
        if not replica.syncs:
            _light.model = 0  # looked at in each forward, until one whose backward averages
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
    writer, light = _writer, _light
    outer: Any = None  # the optimizer whose step goes on: ZeroRedundancyOptimizer steps another inside
    before = PYTHON

    def enter(optimizer: Any, args: Any, kwargs: Any) -> None:
        nonlocal outer, before
        if light.is_on and (id(optimizer) == light.optimizer or light.optimizers.get(id(optimizer))):
            return
        is_inner = light.optimizers.get(id(optimizer)) is False and _is_inside_another()
        if is_inner or get_ident() != writer.owner:
            return
        if gradients.bad_at >= 0:
            gradients.stepping()
        if light.is_on:
            writer.end_light(monotonic_ns(), _getframe(2))
        words = writer.words
        if outer is not None and words[W_PHASE] == OPTIMIZER and _is_inside_another():
            light.know(optimizer, is_counted=False)
            return
        outer, before = optimizer, words[W_PHASE]
        if before & 0xFF in _LEFT or (before & 0xFF == BACKWARD and not is_within(_getframe(2), BACKWARD)):
            before = PYTHON
        writer.mark(OPTIMIZER)
        if writer.is_timed:
            writer.times[at.M_OPTIMIZER_FROM] = words[W_SINCE_NS]

    def leave(optimizer: Any, args: Any, kwargs: Any) -> None:
        nonlocal outer, before
        if light.is_on and (id(optimizer) == light.optimizer or light.optimizers.get(id(optimizer))):
            if light.is_hook_counted:  # else the library says so in a moment
                light.step = light.step_words[0] = step = light.step + 1
                light.micro_steps = light.step_words[1] = 0
                if step >= light.until:
                    _step_ended(step)
            if light.syncs >= light.until_syncs:
                _compare(optimizer, light.step, is_inside=is_within(_getframe(2), BACKWARD))
            if not light.is_on:
                _resume_python()
            return
        if get_ident() != writer.owner:
            return
        if outer is None and light.optimizers.get(id(optimizer)):
            before = PYTHON  # light marks were ended during this step
        elif outer is not optimizer:
            return
        # Not of one whose step calls that of its class, which has hooks as well: light ones would count twice.
        is_counted = light.optimizers.get(id(optimizer)) is not False
        outer, light.optimizer = None, id(optimizer) if is_counted else 0
        light.know(optimizer, is_counted=is_counted)
        writer.mark(before)
        step = light.step + 1
        if light.is_hook_counted:
            _step_ended(writer.end_step(writer.words[W_SINCE_NS]))
        _compare(optimizer, step, is_inside=before & 0xFF == BACKWARD)

    def nothing(optimizer: Any, args: Any, kwargs: Any) -> None:
        """What a compiled optimizer calls."""

    writer.on_step = _step_ended
    hooks = counts.hooks(light, enter, leave)
    module.register_optimizer_step_pre_hook(compiling.let_dynamo_see(hooks[0], nothing))
    module.register_optimizer_step_post_hook(compiling.let_dynamo_see(hooks[1], nothing))
    if (step := compat.optimizer_step(module)) is not None:
        stands_for(OPTIMIZER, step)


def _resume_python() -> None:
    if _writer.words[W_PHASE] & 0xFF == OPTIMIZER:  # the tick thread has ended light marks just now
        resume()


def _step_ended(step: int) -> None:
    """Of any with whole marks; with light ones where something is due."""
    if _light.is_on:
        _writer.end_light_step()
    if states.is_note_due(step):
        if states.note_step_end():
            fingerprints.slower(states.length_ns)
        averaging.look()
    _light.until = min(_writer.next_looked - 1, states.next_note_step)


def _compare(optimizer: Any, num_steps: int, *, is_inside: bool) -> None:
    """Replicas with one another, if it is time for that."""
    if _light.syncs >= fingerprints.next_step or not states.is_synchronised:
        fingerprints.take(_light.syncs, is_in_backward=is_inside, optimizer=optimizer, num_steps=num_steps)
    _light.until_syncs = fingerprints.next_step
