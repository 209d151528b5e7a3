"""Is what ranks gather or add up put to a wrong use that torch does not see? Noted once of each kind, with its line.

    all_gather into a list that holds one tensor several times: only the last rank's values stay
    an integer sum of all ranks that the script then divides in place: the mean is cut off
    a gathered list whose own entry is put back, and goes into the loss: the gradient comes through that entry only

The first calls of a process are looked at, later ones cost a comparison or two. No torch here: tensors are asked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref as _ref

from allranks.record import layout as at
from allranks.record import notes, process

MAX_CALLS = 64
MAX_FLOATS = 1 << 16
"""Sums in floating point after which no sum is looked at any more; each costs 0.5 us (2 shared cores, 2026-11-30): 33 ms in all."""
MAX_NUMEL = 8
MAX_LOSSES = 3
MAX_NODES = 2000
_writer = process.WRITER
_JOINS = ("CatBackward0", "StackBackward0")

gathers: list[tuple[int, int]] = []
"""Of all_gather calls that a loss may use: the line's number, how many ranks; empty = no loss has to be looked at."""
_LEFT = {"gather": MAX_CALLS, "sum": MAX_CALLS, "float": MAX_FLOATS, "loss": MAX_LOSSES}
_left = dict(_LEFT)
_sums: list[tuple[Any, list[int], int, int]] = []  # tensor, its values as they were added up, line, ranks


def gathered(args: tuple[Any, ...], kwargs: dict[str, Any], line: int) -> None:
    """all_gather came back. Never raises."""
    if _left["gather"] <= 0:
        return
    _left["gather"] -= 1
    try:
        into = args[0] if args else kwargs["tensor_list"]
        if len({id(tensor) for tensor in into}) < len(into) and into[0].numel():
            _left["gather"] = 0
            notes.note("aliased", line=_writer.name_of(line), count=len(into), shape=list(into[0].shape)[:4])
        elif into[0].is_floating_point() and len(into) > 1 and _left["loss"]:
            gathers[:] = [*gathers[-3:], (line, len(into))]
    except Exception:  # noqa: BLE001 - no list of tensors: torch has its own words for that
        return


def summed(args: tuple[Any, ...], kwargs: dict[str, Any], line: int) -> None:
    """all_reduce came back. Never raises."""
    if _left["sum"] <= 0:
        return
    try:
        if _sums:
            look_at_sums()
        tensor = args[0] if args else kwargs["tensor"]
        if tensor.is_floating_point():  # nearly all are
            _left["float"] -= 1
            if _left["float"] <= 0:
                _left["sum"] = 0
            return
        op = args[1] if len(args) > 1 else kwargs.get("op")
        if tensor.numel() > MAX_NUMEL or not tensor.is_cpu:
            return
        if op is not None and not str(op).endswith("SUM"):
            return
        _left["sum"] -= 1
        if (ranks := _writer.words[at.W_WORLD_SIZE]) > 1 and str(tensor.dtype) != "torch.bool":
            _sums.append((_ref(tensor), tensor.reshape(-1).tolist(), line, ranks))
    except Exception:  # noqa: BLE001 - see above
        return


LOOKS: dict[str, Callable[[tuple[Any, ...], dict[str, Any], int], None]] = {
    "all_gather": gathered,
    "all_reduce": summed,
}


def look_at_sums() -> None:
    """Has an integer sum become its mean, in place, and lost a part? Never raises."""
    known, _sums[:] = _sums[:], []
    try:
        for reference, sums, line, ranks in known:
            tensor = reference()
            if tensor is None:
                continue
            used = tensor.reshape(-1).tolist()
            if used == [value // ranks for value in sums] and any(value % ranks for value in sums):
                _left["sum"] = 0
                notes.note(
                    "floored", line=_writer.name_of(line), dtype=str(tensor.dtype).removeprefix("torch."), sums=sums, used=used, ranks=ranks
                )  # fmt: skip
                return
    except Exception:  # noqa: BLE001 - a tensor that is gone from its device
        return


def look_at_loss(loss: Any) -> None:
    """Does a gathered list with the own entry put back go into this loss? Never raises."""
    known, gathers[:] = gathers[:], []
    _left["loss"] -= 1
    try:
        own = _writer.words[at.W_RANK]
        for line, ranks in reversed(known):
            if own < ranks and _has_own_entry_alone(loss.grad_fn, own, ranks):
                _left["loss"] = 0
                notes.note("own_entry", line=_writer.name_of(line), ranks=ranks)
                return
    except Exception:  # noqa: BLE001 - a graph of a kind that is not known here
        return


def _has_own_entry_alone(node: Any, own: int, ranks: int) -> bool:
    """Whether the graph joins as many tensors as there are ranks, of which the own one alone has a gradient."""
    seen, todo = {node}, [node]
    while todo and len(seen) < MAX_NODES:
        node = todo.pop()
        before = [entry for entry, _ in node.next_functions]
        if (
            node.name() in _JOINS
            and len(before) == ranks
            and [k for k, e in enumerate(before) if e is not None] == [own]
        ):
            return True
        new = [entry for entry in before if entry is not None and entry not in seen]
        seen.update(new)
        todo += new
    return False


def _after_fork() -> None:
    gathers.clear()
    _sums.clear()
    _left.update(_LEFT)


process.AFTER_FORK.append(_after_fork)
