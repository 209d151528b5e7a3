"""How does a record page become evidence?"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from allranks.record import page
from allranks.watch import source
from allranks.watch.evidence import Call, Loader, Model, Place, Record, Stack, Words
from allranks.watch.observed import Check, Loop, NotFinite
from allranks.watch.stacks import user_place

_EXIT_KINDS = {
    page.ExitKind.NOT_ENDED: "",
    page.ExitKind.ENDED: "ended",
    page.ExitKind.EXCEPTION: "exception",
    page.ExitKind.SYSTEM_EXIT: "system_exit",
    page.ExitKind.HARD_EXIT: "hard_exit",
}
_MAX_SOURCE_BYTES = 4 << 20


def record_of(found: page.Record, now_ns: int | None = None, *, with_model: bool = False) -> Record:
    """The page's values with ages in place of this host's clock, and lines with their text."""
    now = time.monotonic_ns() if now_ns is None else now_ns

    def age(since_ns: int) -> float:
        return max(0.0, (now - since_ns) / 1e9) if since_ns > 0 else 0.0

    return Record(
        step=found.step,
        micro_step=found.micro_step,
        epoch=found.epoch,
        phase=(found.seen_phase if found.is_light else found.phase).name.lower(),
        phase_s=age(found.tick_ns if found.is_light else found.phase_since_ns),
        tick_s=age(found.tick_ns),
        median_step_s=found.median_step_ns / 1e9,
        where=place_of(found.seen_line if found.is_light else found.line),
        is_seen=found.is_light,
        calls=tuple(_call(c, age) for c in found.collectives),
        issued=found.issued,
        issued_at_step=found.issued_at_step,
        group_seq=found.group_seq,
        group_seq_at_step=found.group_seq_at_step,
        num_groups=found.num_groups,
        loader=_loader(found.loader, age),
        loader_before=_loader(found.loader_before, age),
        unused=found.unused,
        parameter=found.last_gradient,
        model=_model(found, with_model),
        exception=_words(found.exception),
        thread_exception=_words(found.thread_exception),
        exit_kind=_EXIT_KINDS[found.exit.kind],
        exit_code=found.exit.code,
        exit_where=place_of(found.exit.line),
        is_destroyed=found.destroyed_ns > 0,
        phases_s={p.name.lower(): ns / 1e9 for p, ns in found.phase_ns.items() if ns},
        said_rank=found.rank,
        said_world_size=found.world_size,
        has_torch=found.has_torch,
        is_probed=found.is_probed,
        not_finite=_not_finite(found.not_finite, age),
        checks=tuple(Check(c.step, c.seq, c.hash, num_steps=c.num_steps) for c in found.checks),
    )


_MARKS = {
    ("/allranks/record/probe_training.py", "marked_forward"): "forward",
    ("/allranks/record/probe_training.py", "marked_backward"): "backward",
    ("/allranks/record/probe_loaders.py", "marked_next"): "data",
    # What they mark: a compiled mark has no frame.
    ("/torch/nn/parallel/distributed.py", "forward"): "forward",
    ("/allranks/wrap/reducer.py", "_forward_lightly"): "forward",
    ("/allranks/wrap/reducer.py", "_forward_alone"): "forward",
    ("/torch/autograd/__init__.py", "backward"): "backward",
    ("/allranks/wrap/straight.py", "backward_through_memory"): "backward",
    ("/torch/utils/data/dataloader.py", "__next__"): "data",
    ("/torch/optim/optimizer.py", "wrapper"): "optimizer",
}


def seen_on(stack: Stack, record: Record) -> Record:
    """The record of a rank in a quick step, whose marks keep no phase: they stand on its stack."""
    found = next(
        (
            what
            for f in stack.frames
            for (file, name), what in _MARKS.items()
            if f.function == name and f.file.endswith(file)
        ),
        "python",
    )
    return replace(record, phase=found, where=user_place(stack.frames) or record.where, is_seen=False)


def place_of(line: str) -> Place | None:
    """'file:line function' of the record as a Place with the text of the line."""
    if not line:
        return None
    where, _, function = line.rpartition(" ")
    file, _, number = where.rpartition(":")
    if not number.isdigit():
        return None
    return with_code(Place(file, int(number), function))


def with_code(place: Place) -> Place:
    """The place with the text of its line, if its file can be read here."""
    text = source_of(place.file)
    if not text or place.code:
        return place
    return Place(place.file, place.line, place.function, source.line_text(text, place.line))


def stack_with_code(stack: Stack) -> Stack:
    """The stack with the text of its lines."""
    return Stack(tuple(with_code(f) for f in stack.frames), stack.thread, stack.is_main)


def guard_of(place: Place) -> Place | None:
    """The `if` on the rank around a line."""
    line = source.rank_guard(source_of(place.file), place.line)
    return with_code(Place(place.file, line, place.function)) if line is not None else None


def condition_of(place: Place) -> Place | None:
    """The innermost `if` or `while` around a line, in its function."""
    line = source.condition(source_of(place.file), place.line)
    return with_code(Place(place.file, line, place.function)) if line is not None else None


def loop_of(place: Place) -> Loop | None:
    """The outermost loop around a line, within its function."""
    lines = source.outer_loop(source_of(place.file), place.line)
    if lines is None:
        return None
    at = source.inner_condition(source_of(place.file), lines[0], place.line)
    condition = with_code(Place(place.file, at, place.function)) if at is not None else None
    return Loop(
        with_code(Place(place.file, lines[0], place.function)),
        last=lines[1],
        line=place.line,
        condition=condition,
    )


def ways_out(loop: Loop) -> tuple[Place, ...]:
    """The conditions under which a loop is left by `break` or `return`."""
    at = loop.at
    lines = source.ways_out(source_of(at.file), at.line, loop.last)
    return tuple(with_code(Place(at.file, line, at.function)) for line in lines)


@lru_cache(maxsize=64)
def source_of(file: str) -> str:
    """The text of a source file; empty if there is none."""
    try:
        path = Path(file)
        if (path.suffix != ".py" and not path.is_file()) or path.stat().st_size > _MAX_SOURCE_BYTES:
            return ""
        return path.read_text(encoding="utf-8", errors="replace")
    except (OSError, ValueError):
        return ""


def _call(c: page.Collective, age) -> Call:
    return Call(
        op=c.op,
        number=c.number,
        group=c.group,
        members=c.ranks,
        seq=c.seq,
        shape=c.shape,
        dtype=c.dtype,
        numel=c.numel,
        num_tensors=c.num_tensors,
        reduce_op=c.reduce_op,
        root=c.root,
        where=place_of(c.line),
        thread=c.thread,
        step=c.step,
        age_s=age(c.entered_ns),
        is_inside=c.is_inside,
        is_async=c.is_async,
        was_waited=c.was_waited,
        has_failed=c.has_failed,
    )


def _loader(found: page.Loader | None, age) -> Loader | None:
    if found is None:
        return None
    return Loader(
        number=found.number,
        drawn=found.drawn,
        length=found.length,
        where=place_of(found.line),
        num_workers=found.num_workers,
        is_exhausted=found.ended_ns > 0,
        asked_s=age(found.asked_ns),
    )


def _not_finite(found: page.NotFinite | None, age) -> NotFinite | None:
    if found is None:
        return None
    return NotFinite(found.step, found.kind, place_of(found.line), age_s=age(found.at_ns), sound=found.sound)


def _words(found: page.LastWords | None) -> Words | None:
    if found is None:
        return None
    return Words(found.type.rsplit(".", 1)[-1], found.message, place_of(found.line), found.thread)


def _model(found: page.Record, with_parameters: bool) -> Model | None:
    if found.model is None:
        return None
    parameters: tuple[str, ...] = ()
    if with_parameters:
        parameters = _parameters(page.side_file(found, ".models.jsonl"))
    return Model(found.model.number, found.model.num_parameters, found.model.hash, parameters)


def _parameters(path: Path) -> tuple[str, ...]:
    """'head.weight float32 [10, 64] trained' for each parameter of the newest model."""
    try:
        newest = json.loads(path.read_text(encoding="utf-8").splitlines()[-1])
    except (OSError, ValueError, IndexError):
        return ()
    return tuple(
        f"{name} {dtype} {list(shape)} {'buffer' if is_buffer else 'trained' if is_trained else 'frozen'}"
        for name, shape, dtype, is_trained, is_buffer in newest.get("tensors", ())
    )
