"""What can be turned, and to which values? Pure: from the machine, the ranks and what is in effect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from allranks.core.overrides import SETTINGS

_WORKERS_OF_RANK, _WORKERS_OF_HOST = 64, 256
_WORKER_MB = 150  # what a loader worker has for itself, of a script with torch and some data
_BATCH_NORM = "batch norm normalises over other samples"


@dataclass(frozen=True, slots=True)
class Knob:
    """A setting and its values; of `ordered` ones a step up or down is tried first, and the next in that direction if it pays."""

    name: str
    values: tuple[Any, ...]
    start: Any
    """What is in effect without us; may be None where the library chooses by itself."""
    is_ordered: bool = True
    changes_here: str = ""
    """What it changes in the training of this script, which it does not of every one."""
    needs: str = ""
    """Another setting, without which (0) this one does nothing."""

    @property
    def changes(self) -> str:
        """What it changes in the training; "" for nothing but the order of sums."""
        return SETTINGS[self.name].changes or self.changes_here

    def neighbours(self, value: Any) -> tuple[tuple[Any, ...], ...]:
        """Directions to try from a value, each the values that lie there, nearest first."""
        if not self.is_ordered:
            return tuple((v,) for v in self.values if v != value)
        if value is None or value not in self.values:
            known = value if isinstance(value, int | float) and not isinstance(value, bool) else None
            above = tuple(v for v in self.values if known is None or v > known)
            below = tuple(v for v in reversed(self.values) if known is not None and v < known)
            return tuple(d for d in (above, below) if d)
        at = self.values.index(value)
        return tuple(d for d in (self.values[at + 1 :], tuple(reversed(self.values[:at]))) if d)


@dataclass(frozen=True, slots=True)
class Machine:
    """What the values depend on."""

    num_cores: int
    nproc: int
    num_gpus: int = 0
    has_compiler: bool = False
    free_mb: int = 1 << 20
    """Memory that is left for loader workers."""


@dataclass(frozen=True, slots=True)
class Knobs:
    """What is turned, and what would be if the user allowed what it changes."""

    turned: list[Knob]
    left: list[Knob]


def knobs_for(
    machine: Machine,
    in_effect: Mapping[str, Any],
    *,
    only: Sequence[str] = (),
    without: Sequence[str] = (),
    may_change_results: bool = False,
    values: Mapping[str, Sequence[Any]] = MappingProxyType({}),
) -> Knobs:
    """The knobs of a script, most promising first.

    Args:
        machine: Cores, ranks, GPUs.
        in_effect: What the script has now (a trial says it); a script without allranks has only the launcher's.
        only: Names to turn; all if none are given.
        without: Names to leave alone.
        may_change_results: Also what rounds differently (precision, compress), or gives batch norm other samples (micro-batches).
        values: To try of these settings, in place of the usual ones.
    """
    found = [
        replace(k, values=tuple(sorted(values[k.name]))) if k.name in values else k
        for k in _all(machine, in_effect)
    ]
    wanted = [k for k in found if k.name not in without and (not only or k.name in only)]
    wanted = [k for k in wanted if _applies(k, machine, in_effect)]
    left = [k for k in wanted if k.changes and not (may_change_results or k.name in only)]
    return Knobs([k for k in wanted if k not in left], left)


def _all(machine: Machine, in_effect: Mapping[str, Any]) -> list[Knob]:
    share = max(1, machine.num_cores // machine.nproc)
    parts = _BATCH_NORM if in_effect.get("has_batch_norm") else ""
    precisions = ("fp32", "bf16", "fp16") if machine.num_gpus else ("fp32", "bf16")
    return [
        Knob("num_workers", _doubling(0, _most_workers(machine)), in_effect.get("num_workers")),
        Knob("threads", _doubling(1, machine.num_cores), in_effect.get("threads") or share),
        Knob("micro_batch_size", _micro_batches(in_effect), _micro_batch(in_effect), changes_here=parts),
        Knob("channels_last", (False, True), in_effect.get("channels_last", False), is_ordered=False),
        Knob("bucket_cap_mb", (1.0, 5.0, 25.0, 100.0), in_effect.get("bucket_cap_mb") or 25.0),
        Knob("prefetch_factor", (1, 2, 4, 8), in_effect.get("prefetch_factor") or 2, needs="num_workers"),
        Knob("bind_cores", (False, True), False, is_ordered=False),
        Knob("precision", precisions, in_effect.get("precision", "fp32"), is_ordered=False),
        Knob("compress", ("none", "bf16"), in_effect.get("compress", "none"), is_ordered=False),
        Knob("compile", (False, True), in_effect.get("compile", False), is_ordered=False),
    ]


def _most_workers(machine: Machine) -> int:
    """Of a rank. Workers that wait for a disk or a network need no core: doubling goes on while it pays, and memory lasts."""
    each = machine.free_mb // 2 // _WORKER_MB // machine.nproc
    most = max(2, min(_WORKERS_OF_RANK, _WORKERS_OF_HOST // machine.nproc, each))
    return 1 << (most.bit_length() - 1)


def _applies(knob: Knob, machine: Machine, in_effect: Mapping[str, Any]) -> bool:
    if SETTINGS[knob.name].where == "the launcher":
        return machine.num_gpus == 0 and machine.num_cores > 1
    if knob.name == "prefetch_factor":
        return "num_workers" in in_effect  # read by workers, which there may be later
    if knob.name == "channels_last":
        return bool(in_effect.get("has_convolutions"))
    if knob.name not in in_effect and knob.name != "micro_batch_size":
        return False  # the script never asks for it
    if knob.name == "compile":
        return machine.has_compiler
    if knob.name in ("bucket_cap_mb", "compress"):
        return machine.nproc > 1 and in_effect.get("sync_every", 1) == 1  # else no gradients are sent
    return len(knob.values) > 1


def _doubling(least: int, most: int) -> tuple[int, ...]:
    """0, 1, 2, 4, ... and the largest."""
    values = {least, most}
    value = 1
    while value < most:
        values.add(value)
        value *= 2
    return tuple(sorted(v for v in values if v >= least))


def _micro_batch(in_effect: Mapping[str, Any]) -> int | None:
    """Samples of a rank in one forward, as it is now."""
    share = in_effect.get("rank_batch_size")
    if not isinstance(share, int):
        return None
    asked = in_effect.get("micro_batch_size")
    if isinstance(asked, int):
        return min(asked, share)
    return max(1, -(-share // int(in_effect.get("accumulation_steps") or 1)))


def _micro_batches(in_effect: Mapping[str, Any]) -> tuple[int, ...]:
    """Parts of a rank's share of a global batch: whole, in 2, 3, 4, ... micro-batches; powers of two or not."""
    share = in_effect.get("rank_batch_size")
    if not isinstance(share, int) or share < 2:
        return ()
    return tuple(sorted({-(-share // parts) for parts in (1, 2, 3, 4, 6, 8, 16, 32) if parts <= share}))
