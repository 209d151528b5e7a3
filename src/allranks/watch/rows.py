"""What does a node say about its ranks in each beat?

One small value per rank, about 250 bytes as JSON; enough to notice that something is wrong, not to explain it.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

from allranks.watch.evidence import Call, Record
from allranks.watch.meeting import POINT_TO_POINT, key_of

MAX_TAIL = 12
MAX_CHECKS = 12
"""At least 0.1 s apart: rows of two nodes may be three quarters of a second apart, and the last two that they share count."""
_WAIT_PHASES = ("backward", "collective")


@dataclass(frozen=True, slots=True)
class Row:
    """One rank at one moment."""

    rank: int
    state: str = ""
    phase: str = ""
    phase_s: float = 0.0
    """Age of the phase when the row was made."""
    tick_s: float = 0.0
    step: int = 0
    median_step_s: float = 0.0
    seq: int = -1
    """Collectives issued in the default group."""
    marks: int = 0
    op: str = ""
    """The call it is inside; empty = in none."""
    group: str = ""
    call_seq: int = -1
    call_hash: int = 0
    """Equal where calls are the same: operation, sizes, type, root, reduction and line."""
    call_s: float = 0.0
    members: str = ""
    where: str = ""
    """file:line of the call or phase, for a node that cannot be asked any more."""
    code: str = ""
    tail: tuple[tuple[str, int, int], ...] = ()
    """(group, number, hash) of the newest calls."""
    work_s: float = 0.0
    """Time so far outside backward and collectives."""
    wait_s: float = 0.0
    phases_s: tuple[float, ...] = ()
    """Time so far in WORK_PHASES, in their order."""
    is_over: bool = False
    """Its script has come to its end, or its process is gone."""
    has_ended_well: bool = False
    is_dying: bool = False
    """An exception or sys.exit has ended its script; the process is still there."""
    loader: tuple[int, int, int, bool] | None = None
    """(pass, drawn, length, is exhausted) of its data loader."""
    is_interrupted: bool = False
    """Ctrl-C reached it: the job is being stopped by a person."""
    is_leaving: bool = False
    """Its script is at its end, however; the process is still there."""
    not_finite_step: int = 0
    """The step, 1 = the first, whose loss was the first that was not finite; 0 = none was."""
    checks: tuple[tuple[int, int, int], ...] = ()
    """(step, collectives so far, hash) of the newest fingerprints of the replicas."""
    notes: int = 0
    """Bytes of what it has noted so far."""
    exchanged: tuple[float, ...] = ()
    """Seconds so far in backward, in DDP's exchange of buffers in forward; of timed steps: after the last gradient, in all of backward."""
    said: tuple[int, int] = (-1, -1)
    """Rank and world size by which it goes itself."""
    num_groups: int = 0
    """Process groups made beside the default one."""
    model: tuple[int, int] = (0, 0)
    """Number and hash of the newest model given to DDP."""
    is_asleep: bool = False
    """Its main thread has stood for a while, in a sleep of the kernel's."""

    def to_json(self) -> list[Any]:
        """A list in the order of the fields."""
        return [
            list(map(list, v))
            if n in ("tail", "checks")
            else list(v)
            if n in ("phases_s", "exchanged", "said", "model")
            else v
            for n, v in self._pairs()
        ]

    def _pairs(self) -> list[tuple[str, Any]]:
        return [(n, getattr(self, n)) for n in self.__dataclass_fields__]

    @classmethod
    def from_json(cls, values: list[Any]) -> Row:
        """The way back."""
        known = dict(zip(cls.__dataclass_fields__, values, strict=False))
        known["tail"] = tuple((g, n, h) for g, n, h in known.get("tail", ()))
        known["checks"] = tuple((s, q, h) for s, q, h in known.get("checks", ()))
        known["phases_s"] = tuple(known.get("phases_s", ()))
        known["exchanged"] = tuple(known.get("exchanged", ()))
        known |= {n: (int(known[n][0]), int(known[n][1])) for n in ("said", "model") if n in known}
        loader = known.get("loader")
        known["loader"] = (
            (int(loader[0]), int(loader[1]), int(loader[2]), bool(loader[3])) if loader else None
        )
        return cls(**known)


WORK_PHASES = ("python", "data", "forward", "optimizer", "checkpoint", "evaluate")


def row_of(
    rank: int,
    state: str,
    record: Record | None,
    marks: int = 0,
    *,
    is_over: bool = False,
    ended_well: bool = False,
) -> Row:
    """The row of a rank from its record."""
    if record is None:
        return Row(rank, state, is_over=is_over, has_ended_well=ended_well)
    call = record.inside
    waits_in_call = call is not None and not (call.is_async and not call.was_waited)
    place = call.where if waits_in_call and call else record.where
    seen = [(c.group, c.seq, hash_of(c)) for c in record.calls if c.seq >= 0 and _is_compared(c)]
    phases = [record.phases_s.get(p, 0.0) for p in WORK_PHASES]
    if record.phase in WORK_PHASES:
        phases[WORK_PHASES.index(record.phase)] += record.phase_s
    waited = sum(record.phases_s.get(p, 0.0) for p in _WAIT_PHASES) + (
        record.phase_s if record.phase in _WAIT_PHASES else 0.0
    )
    return Row(
        rank=rank,
        state=state,
        phase=record.phase,
        phase_s=round(record.phase_s, 3),
        tick_s=round(record.tick_s, 2),
        step=record.step,
        median_step_s=round(record.median_step_s, 4),
        seq=record.group_seq,
        marks=marks,
        op=call.op if waits_in_call and call else "",
        group=call.group if waits_in_call and call else "",
        call_seq=call.seq if waits_in_call and call else -1,
        call_hash=hash_of(call) if waits_in_call and call else 0,
        call_s=round(call.age_s, 3) if waits_in_call and call else 0.0,
        members=call.members if waits_in_call and call else "",
        where=f"{place.file}:{place.line}" if place else "",
        code=place.code[:60] if place else "",
        tail=tuple(seen[-MAX_TAIL:]),
        loader=_loader(record),
        work_s=round(sum(phases), 3),
        wait_s=round(waited, 3),
        phases_s=tuple(round(p, 3) for p in phases),
        is_over=is_over or record.exit_kind != "" or record.phase == "exit",
        has_ended_well=ended_well or record.exit_kind == "ended",
        is_dying=not is_over and is_dying(record),
        is_interrupted=record.exception is not None and record.exception.kind == "KeyboardInterrupt",
        is_leaving=not is_over and record.exit_kind == "" and record.phase == "exit",
        not_finite_step=record.not_finite.step if record.not_finite else 0,
        checks=tuple((c.step, c.seq, c.hash) for c in record.checks[-MAX_CHECKS:]),
        said=(record.said_rank, record.said_world_size),
        num_groups=record.num_groups,
        model=(record.model.number, record.model.hash) if record.model else (0, 0),
    )


def is_dying(record: Record) -> bool:
    """Whether an exception or sys.exit has ended the script, and only the interpreter's own end is to come."""
    if record.exception is not None and record.exception.kind == "KeyboardInterrupt":
        return False  # Ctrl-C reaches the ranks before the agent says so
    return record.exit_kind == "exception" or (record.exit_kind == "system_exit" and record.exit_code != 0)


def _loader(record: Record) -> tuple[int, int, int, bool] | None:
    found = record.loader
    return (found.number, found.drawn, found.length, found.is_exhausted) if found else None


def _is_compared(call: Call) -> bool:
    return call.op not in POINT_TO_POINT and not call.op.startswith("wait(")


def hash_of(call: Call) -> int:
    """32 bits that are equal where two ranks' calls are."""
    keys = tuple(
        str(key_of(call, w)) for w in ("op", "members", "dtype", "shape", "root", "reduce_op", "line")
    )
    return zlib.crc32("|".join(keys).encode())
