"""Marks of torch.distributed: joining, leaving, groups, and every collective, send, receive and wait."""

from __future__ import annotations

import functools
import inspect
import sys
from _thread import get_ident
from collections.abc import Callable
from typing import Any

from allranks.record import compat, gathered, joining, process, states
from allranks.record import layout as at
from allranks.record.calls import Call

_writer, _lines = process.WRITER, process.LINES

# Functions that all ranks of a group must call.
COLLECTIVES = (
    "all_reduce",
    "all_reduce_coalesced",
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_gather_single",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "monitored_barrier",
    "new_group",
    "new_subgroups",
    "new_subgroups_by_enumeration",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
    "split_group",
)
POINT_TO_POINT = (
    "send",
    "recv",
    "isend",
    "irecv",
    "batch_isend_irecv",
    "send_object_list",
    "recv_object_list",
)
_MAX_PENDING = 256  # handles that nobody waits for must not pile up
_pending: dict[int, tuple[int, int]] = {}  # id of the handle: slot, number of the call


def mark_collectives(module: Any) -> None:
    """The functions of torch.distributed.distributed_c10d, before others take their names from it."""
    for name in COLLECTIVES + POINT_TO_POINT:
        function = getattr(module, name, None)
        if callable(function):
            setattr(module, name, _marked(function, name, module, name in COLLECTIVES))
    joining.mark_joining(module)
    work = compat.work_class()
    if work is not None:
        work.wait = _marked_wait(work.wait)  # type: ignore[method-assign]


def _marked(function: Callable[..., Any], name: str, module: Any, is_counted: bool) -> Callable[..., Any]:
    torch = sys.modules["torch"]  # not whole yet: torch.compiler is looked up when it is called
    call = Call(name, inspect.signature(function), module, is_counted)
    inside, look = states.inside, gathered.LOOKS.get(name)

    @functools.wraps(function)
    def marked(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        thread = get_ident()
        if thread in inside:
            return function(*args, **kwargs)
        line = _lines.here()
        slot = call.enter(args, kwargs, thread, line >> 8)
        if slot < 0:  # this rank is not in the group: torch returns at once
            return function(*args, **kwargs)
        inside.add(thread)
        before = _writer.mark(at.COLLECTIVE | line) if thread == _writer.owner else -1
        flags = at.FAILED
        try:
            result = function(*args, **kwargs)
            flags = at.ASYNC if _note_handles(result, slot) else 0
        except BaseException as error:
            states.raised(error, name)
            raise
        finally:
            inside.discard(thread)
            _writer.exit_collective(slot, flags)
            if before >= 0:
                _writer.mark(before)
        if look is not None and result is None:  # it is complete
            look(args, kwargs, line >> 8)
        return result

    return marked


def _note_handles(result: Any, slot: int) -> bool:
    """Remember the handles a call returned, for their wait; whether there are any."""
    if result is None:
        return False
    handles = result if isinstance(result, list) else [result]
    if not hasattr(handles[0] if handles else None, "wait"):
        return False
    if len(_pending) > _MAX_PENDING:
        _pending.clear()
    for handle in handles:
        _pending[id(handle)] = slot, _writer.words[slot]
    return True


def _marked_wait(wait: Callable[..., Any]) -> Callable[..., Any]:
    inside = states.inside

    @functools.wraps(wait)
    def marked(self: Any, *args: Any, **kwargs: Any) -> Any:
        thread = get_ident()
        known = None if thread in inside else _pending.pop(id(self), None)
        if known is None:
            return wait(self, *args, **kwargs)
        line = _lines.here()
        slot = _enter_wait(known, thread, line >> 8)
        before = _writer.mark(at.COLLECTIVE | line) if thread == _writer.owner else -1
        flags = at.FAILED
        try:
            result = wait(self, *args, **kwargs)
            flags = 0
        except BaseException as error:
            states.raised(error, "wait")
            raise
        finally:
            _writer.exit_collective(slot, flags)
            if before >= 0:
                _writer.mark(before)
        return result

    return marked


def _enter_wait(known: tuple[int, int], thread: int, line: int) -> int:
    """A slot for the wait that says what is waited for, if that is still in the ring."""
    old, number = known
    words = _writer.words
    if words[old + at.S_HEAD] != number:
        return _writer.enter_collective(_writer.string("wait"), line=line, is_counted=False)
    words[old + at.S_FLAGS] |= at.WAITED
    dims = tuple(words[old + at.S_DIMS : old + at.S_DIMS + min(words[old + at.S_NDIM], at.NUM_DIMS)])
    return _writer.enter_collective(
        Call.wait_of(words[old + at.S_OP]),
        words[old + at.S_GROUP],
        ranks=words[old + at.S_RANKS],
        seq=words[old + at.S_SEQ],
        reduce_op=words[old + at.S_REDUCE],
        root=words[old + at.S_ROOT],
        dtype=words[old + at.S_DTYPE],
        shape=dims,
        numel=words[old + at.S_NUMEL],
        num_tensors=words[old + at.S_TENSORS],
        line=line,
        thread=Call.thread_name(thread),
        is_counted=False,
    )
