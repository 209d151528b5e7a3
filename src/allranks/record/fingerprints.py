"""Are the replicas still the same? A fingerprint of all parameters after some of the steps, for others to compare.

    period from the cost -> sum of the bits of each parameter -> page: (step, collectives so far, hash), <pid>.sums: each parameter

A step here is a backward that averaged gradients, and the optimizer's step after it: counted by DDP's forwards, so that a rank which
leaves an optimizer step out is still compared with the others. A period is a power of two, so ranks that chose different ones
still meet. With the parameters goes the learning rate, which must be the same everywhere, too. Nothing is taken where replicas may differ
by design: after a step whose backward was under no_sync (once is enough for good), with a communication hook that is not known
to average, of modules that are not in a DDP of all ranks. Buffers are left out: ranks keep their own between forwards. On a GPU
reading the sums would wait for it, so there is nothing there. Read by `read_sums`. No torch here.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import sys
import weakref
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from time import monotonic_ns
from typing import Any

from allranks.record import compat, process, states, watched
from allranks.record import layout as at

SHARE, QUICK_SHARE = 0.001, 0.0005
"""Of the time of the steps that the checks may take; of quick ones, which all else that is looked at costs the larger share."""
APART_NS = 200_000_000
"""Checks are so far apart, so that a reader who comes twice a second finds the same ones in all records."""
QUICK_APART_NS = 1_000_000_000
"""No more than this, or what the larger share gives, for the sake of the smaller one: two checks must differ before it is said."""
MAX_PERIOD = 1 << 20
MAX_STRANGERS = 64
"""So many steps in a row of optimizers that hold no parameter of a replica: they are stepped in some other way."""
RATE = "learning rate"

_writer = process.WRITER
next_step = 1
_last = 0  # step of the check before
_since = (0, 0)  # step and time from which on it is measured how long steps take
_cost_ns = _took_ns = 0  # what a check is taken to cost, and what the last one took
_names: list[str] = []
_slot = 0
_file: memoryview | None = None
_strangers = 0
_optimizer: Any = None  # weakly: the one after whose step replicas were compared last


def take(step: int, *, is_in_backward: bool = False, optimizer: Any = None, num_steps: int = 0) -> None:
    """Take the fingerprint after step `step`, and decide when to take the next; never raises.

    Args:
        step: Forwards of DDP so far whose backward averages gradients.
        is_in_backward: The optimizer stepped within backward: other parameters are still to be stepped.
        optimizer: Who has stepped; one that holds no parameter of a replica is passed over.
        num_steps: Steps of all optimizers that have ended.
    """
    global next_step, _last, _since, _cost_ns, _took_ns, _strangers, _optimizer
    if not states.is_synchronised or is_in_backward:
        next_step, states.is_synchronised = states.NEVER, True
    if next_step == states.NEVER:
        return
    began = monotonic_ns()
    try:
        is_known = _optimizer is not None and _optimizer() is optimizer
        if optimizer is not None and not is_known and not _is_ours(optimizer):
            _strangers += 1
            next_step = states.NEVER if _strangers >= MAX_STRANGERS else next_step
            return
        _strangers = 0
        seq = compat.sequence_number(states.world) if states.world is not None else -1
        found = _sums() if seq >= 0 else None
        if found:
            _optimizer = None if optimizer is None else weakref.ref(optimizer)
            _write(step, seq | num_steps << 32, found if optimizer is None else [_rate(optimizer), *found])
            watched.look(step, seq, states.known_replicas())
    except Exception:  # noqa: BLE001 - parameters of a kind that is not known here: the job must not notice
        next_step = states.NEVER
        return
    ended = monotonic_ns()
    before_ns, _took_ns = _took_ns, ended - began
    # The lesser of two: the first makes the file, and any may be interrupted, which would put off the next by minutes.
    _cost_ns = min(before_ns, _took_ns) if before_ns else _took_ns
    period = 1
    if _last:
        period = _period((began - _since[1]) // max(1, step - _since[0]))
    next_step = (step // period + 1) * period
    _last = step
    _since = step, ended


def _period(step_ns: int) -> int:
    """In steps of so long."""
    apart_ns, period = _cost_ns / SHARE, 1
    if states.is_quick:
        apart_ns = min(_cost_ns / QUICK_SHARE, max(apart_ns, QUICK_APART_NS))
    while period < MAX_PERIOD and period * max(1, step_ns) < max(APART_NS, apart_ns):
        period *= 2
    return period


def slower(step_ns: int) -> None:
    """Steps were quick, and now take so long: the next check does not wait for as many of them as were chosen for quick ones."""
    global next_step, _since
    if _last:
        period, syncs = _period(step_ns), _writer.light.syncs
        next_step = min(next_step, (syncs // period + 1) * period)
        _writer.light.until_syncs = min(_writer.light.until_syncs, next_step)
        _since = syncs - 1, monotonic_ns() - step_ns  # one may be due just now


def _sums() -> list[tuple[str, int, int]]:
    """(name, sum of its bits, changes in place so far) of the parameters of all replicas; empty if there are none.

    Raises:
        ValueError: A parameter is not on the CPU.
    """
    torch = sys.modules["torch"]
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    rows = []
    with torch.no_grad():
        for name, parameter in _parameters():
            if not parameter.is_cpu:
                raise ValueError(name)
            bits = parameter.view(kinds[parameter.element_size()])
            rows.append((name, bits.sum().item(), parameter._version))
    return rows


def last() -> None:
    """The script has trained: compare once more, whatever the period says. Never raises."""
    global next_step
    optimizer = _optimizer() if _optimizer is not None else None
    if (
        optimizer is None
        or next_step == states.NEVER
        or _writer.light.syncs <= _last
        or not states.is_synchronised
    ):
        return
    next_step = _writer.light.syncs
    take(_writer.light.syncs, optimizer=optimizer, num_steps=_writer.step)


def _is_ours(optimizer: Any) -> bool:
    """Whether it steps a parameter of a replica that is compared."""
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return any(id(p) in stepped for _, p in _parameters())


def _rate(optimizer: Any) -> tuple[str, int, int]:
    """The learning rate of the first group, as a row: its bits."""
    return RATE, struct.unpack("q", struct.pack("d", float(optimizer.param_groups[0]["lr"])))[0], 0


def _parameters() -> Iterator[tuple[str, Any]]:
    replicas = [ddp for ddp in states.known_replicas() if compat.keeps_equal(ddp, states.world)]
    for number, ddp in enumerate(replicas):
        ignored = compat.ignored_parameters(ddp)
        before = f"model {number + 1}: " if len(replicas) > 1 else ""
        for name, parameter in ddp.module.named_parameters():
            if name not in ignored:
                yield before + name, parameter


def _write(step: int, seq: int, rows: list[tuple[str, int, int]]) -> None:
    global _names, _slot, _file
    names = [row[0] for row in rows]
    if names != _names:
        _file, _names, _slot = _new_file(names), names, 0
    sums = array("q", [step, *(row[1] for row in rows), *(row[2] for row in rows)])
    digest = blake2b(sums[1 : len(rows) + 1], digest_size=7).digest()
    words, base = _writer.words, at.CHECKS + _slot * at.CHECK_WORDS
    words[base + at.C_STEP] = 0
    if _file is not None:
        start = _slot * len(sums)
        _file[start : start + len(sums)] = memoryview(sums)
    words[base + at.C_TAIL], words[base + at.C_SEQ] = step, seq
    words[base + at.C_HASH] = int.from_bytes(digest, "little")
    words[base + at.C_STEP] = step
    _slot = (_slot + 1) % at.NUM_CHECKS


def _new_file(names: list[str]) -> memoryview | None:
    """The mapped `<pid>.sums`: for each slot the step, then the sums, then the numbers of changes."""
    _forget_checks()
    path = process.side_path(at.SUMS_SUFFIX)
    if path is None:
        return None
    size = 8 * at.NUM_CHECKS * (1 + 2 * len(names))
    making = path + ".new"
    descriptor = os.open(making, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, size)
        buffer = mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)
    Path(making).replace(path)
    Path(process.side_path(at.NAMES_SUFFIX) or "").write_text(json.dumps(names), encoding="utf-8")
    return memoryview(buffer).cast("q")


def _forget_checks() -> None:
    for slot in range(at.NUM_CHECKS):
        _writer.words[at.CHECKS + slot * at.CHECK_WORDS + at.C_STEP] = 0


def _after_fork() -> None:
    global next_step, _last, _took_ns, _names, _file, _strangers, _optimizer
    _optimizer = None
    next_step, _last, _took_ns, _names, _file, _strangers = 1, 0, 0, [], None, 0


process.AFTER_FORK.append(_after_fork)


@dataclass(frozen=True, slots=True)
class Sums:
    """What lies behind one fingerprint: for each parameter the sum of its bits, and how often it was changed in place."""

    step: int
    sums: tuple[int, ...]
    changes: tuple[int, ...]


def read_sums(page_path: str) -> tuple[tuple[str, ...], dict[int, Sums]]:
    """The names of the parameters, and by step what the last checks found; nothing if there are no checks."""
    stem = Path(page_path)
    try:
        names = tuple(json.loads(stem.with_suffix(at.NAMES_SUFFIX).read_text(encoding="utf-8")))
        data = stem.with_suffix(at.SUMS_SUFFIX).read_bytes()
    except (OSError, ValueError):
        return (), {}
    width = 1 + 2 * len(names)
    if len(data) != 8 * at.NUM_CHECKS * width:
        return (), {}
    found = {}
    for slot in range(at.NUM_CHECKS):
        step, *values = struct.unpack_from(f"{width}q", data, 8 * slot * width)
        if step:
            found[step] = Sums(step, tuple(values[: len(names)]), tuple(values[len(names) :]))
    return names, found
