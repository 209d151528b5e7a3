"""Marks of joining and leaving: init_process_group, destroy_process_group, and what is known from then on."""

from __future__ import annotations

import functools
import os
import sys
from _thread import get_ident
from collections.abc import Callable
from time import monotonic_ns
from typing import Any

from allranks.record import calls, closing, compat, notes, process, states, ticking
from allranks.record import layout as at

_writer, _lines = process.WRITER, process.LINES


def mark_joining(module: Any) -> None:
    """Mark both, and count the groups that are made."""
    module.init_process_group = _marked_init(module.init_process_group, module)
    module.destroy_process_group = _marked_destroy(module.destroy_process_group, module)
    for name in ("new_group", "split_group"):
        if hasattr(module, name):
            setattr(module, name, _counted(getattr(module, name)))


def _marked_init(init: Callable[..., None], module: Any) -> Callable[..., None]:
    @functools.wraps(init)
    def marked(*args: Any, **kwargs: Any) -> None:
        _become_rank(args, kwargs)
        _note_meeting(args, kwargs, module)
        before = _writer.mark(at.INIT | _lines.here())
        ticking.start()
        try:
            with states.inside_call():
                init(*args, **kwargs)
        except BaseException as error:
            states.raised(error, "init_process_group")
            raise
        finally:
            _writer.mark(before)
        has_joined(module)

    return marked


def _note_meeting(args: tuple[Any, ...], kwargs: dict[str, Any], module: Any) -> None:
    """Where this rank will meet the others, how long it waits for them, and with which torch; never raises."""
    try:
        method = args[1] if len(args) > 1 else kwargs.get("init_method")
        timeout = args[2] if len(args) > 2 else kwargs.get("timeout")
        backend = str((args[0] if args else kwargs.get("backend")) or "")
        address = f"{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}"
        notes.note(
            "meets",
            at=address if method in (None, "env://") else str(method),
            by_environment=method in (None, "env://") and kwargs.get("store") is None,
            timeout_s=_timeout_s(module, timeout, backend),
            torch=getattr(sys.modules.get("torch"), "__version__", "?"),
        )
    except Exception:  # noqa: BLE001 - arguments that torch itself will refuse
        return


def _timeout_s(module: Any, given: Any, backend: str) -> float | None:
    """How long a collective waits for others; torch's own value if none is given."""
    name = "default_pg_nccl_timeout" if "nccl" in backend else "default_pg_timeout"
    found = given if given is not None else getattr(module, name, None)
    return found.total_seconds() if found is not None else None


def has_joined(module: Any) -> None:
    """The default process group is there."""
    _writer.words[at.W_STEP_SEQ] = _writer.words[at.W_GROUP_SEQ] = -1  # they were of a group before
    states.world = compat.default_group(module)
    calls.forget_groups()
    process.become(at.RANK_ROLE, rank=module.get_rank(), world_size=module.get_world_size())
    ticking.start()
    closing.register()


def _become_rank(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Before joining, so that a rank that waits here for others is known by its number."""
    _writer.owner = get_ident()
    _writer.words[at.W_DESTROYED_NS] = 0
    world_size, rank = kwargs.get("world_size", -1), kwargs.get("rank", -1)  # the 4th and 5th by position
    if len(args) > 4:
        world_size, rank = args[3], args[4]
    known = isinstance(rank, int) and isinstance(world_size, int)
    process.become(at.RANK_ROLE, rank=rank if known else -1, world_size=world_size if known else 0)
    compat.let_agent_trace(process.number_in("ALLRANKS_AGENT_PID"))


def _marked_destroy(destroy: Callable[..., None], module: Any) -> Callable[..., None]:
    @functools.wraps(destroy)
    def marked(*args: Any, **kwargs: Any) -> None:
        thread = get_ident()
        if thread in states.inside or states.world is None:
            destroy(*args, **kwargs)
            return
        line = _lines.here()
        if thread == _writer.owner:
            closing.look()
        slot = _writer.enter_collective(
            _writer.string("destroy_process_group"), line=line >> 8, is_counted=False
        )
        before = _writer.mark(at.COLLECTIVE | line) if thread == _writer.owner else -1
        try:
            with states.inside_call():
                destroy(*args, **kwargs)
        finally:
            _writer.exit_collective(slot)
            if before >= 0:
                _writer.mark(before)
        calls.forget_groups()
        states.world = compat.default_group(module)
        if states.world is None:
            _writer.words[at.W_DESTROYED_NS] = monotonic_ns()

    return marked


def _counted(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def counted(*args: Any, **kwargs: Any) -> Any:
        group = make(*args, **kwargs)
        calls.forget_groups()
        _writer.words[at.W_GROUPS] += 1
        return group

    return counted
