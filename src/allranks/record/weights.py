"""How many samples is a loss the mean of, and by what is it multiplied? Noted of a few steps, for perf/mean_of_means.py to compare.

    loss -> MulBackward, DivBackward (numbers: its weight) -> NllLossBackward, MseLossBackward, MeanBackward (what it is the mean of)

Asked when backward is called: the graph is whole then. At most MAX_NODES of it are passed, shapes are read and single numbers, never a
value of the user's that a hook keeps. What is not as simple (several losses added up, functions of the user's own, a compiled
loss, factors on a GPU, several models, forwards and backwards that do not take turns) is left alone. No torch here.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite, prod
from typing import Any

from allranks.record import compat, notes, origin, passes, process, states
from allranks.record import layout as at

_writer = process.WRITER
KIND = "weights"
MAX_NODES, MAX_MICRO_STEPS, MAX_NOTED, MAX_UNKNOWN = 8, 32, 12, 3
FIRST, EARLY, EARLY_PREFERENCE = 3, 64, 3
"""Noted are the first steps, then one of eight, after EARLY those that all ranks look at, how quick they may be: one of 128 or 256."""
MEAN, SUM = 1, 2  # of torch's reductions
_THROUGH = ("ViewBackward0", "ReshapeAliasBackward0", "UnsafeViewBackward0", "ToCopyBackward0", "CloneBackward0", "AliasBackward0",
            "SqueezeBackward0", "SqueezeBackward1", "UnsqueezeBackward0", "NegBackward0")  # fmt: skip
_LOSSES = ("MseLossBackward0", "SmoothL1LossBackward0", "HuberLossBackward0", "SoftMarginLossBackward0",
           "BinaryCrossEntropyBackward0", "BinaryCrossEntropyWithLogitsBackward0")  # fmt: skip

due = 0
"""So many steps have ended when the next one begins that is noted."""


@dataclass(frozen=True)
class Mean:
    """What one backward was called on."""

    op: str
    items: int
    """The mean is taken over so many values; of a loss that leaves targets out, those that count."""
    weight: float
    """How much the mean counts: 0.25 for `loss / 4`."""
    is_of_targets: bool
    """They are classes, and it is known which of them count."""


_micro_steps: list[tuple[Mean, list[Any]]] = []
_sources: list[tuple[str, int]] = []  # line of backward, number of the pass that the samples are from
_unknown = _noted = 0
_is_odd = False


def look(loss: Any, line: int) -> None:
    """Backward is called on `loss`, in a step that is due or after it. Never raises."""
    try:
        if _writer.is_library_stepped:  # run.loader and run.step weigh by count
            _stop()
            return
        if _writer.step > due:
            _finish()
        if _writer.step == due and _writer.is_looked:
            _add(loss, line)
    except Exception:  # noqa: BLE001 - a graph of a kind that is not known here
        _stop()


def _stop() -> None:
    global due
    due, origin.wants_rows = states.NEVER, False
    _micro_steps.clear()


def _add(loss: Any, line: int) -> None:
    global _is_odd
    if _is_odd:
        return
    words = _writer.words
    found = read(loss) if words[at.W_MICRO_STEP] == len(_micro_steps) + 1 <= MAX_MICRO_STEPS else None
    if found is None:
        _is_odd = True
        return
    batch, loader = passes.batch, at.LOADER
    source = _writer.name_of(line >> 8), words[loader + at.L_NUMBER]
    if source not in _sources:
        _sources.append(source)
    known = len(batch) if isinstance(batch, (list, tuple)) else 0
    is_last = words[loader + at.L_DRAWN] == words[loader + at.L_LENGTH] > 1
    weight = float(f"{found.weight:.6g}")
    _micro_steps.append(
        (found, [_sources.index(source), origin.rows, known, found.items, weight, int(is_last)])
    )


def _finish() -> None:
    """The step that was due has ended: it is noted, if all of it is known, and another is due."""
    global due, _unknown, _noted, _is_odd
    means, rows = [mean for mean, _ in _micro_steps], [row for _, row in _micro_steps]
    kinds = {(mean.op, mean.is_of_targets) for mean in means}
    if means and not _is_odd and len(kinds) == 1 and _is_averaged():
        op, is_of_targets = kinds.pop()
        notes.note(
            KIND,
            step=due + 1,
            op=op,
            targets=is_of_targets,
            lines=[where for where, _ in _sources],
            rows=rows,
        )
        _noted += 1
    elif means or _is_odd:
        _unknown += 1
    _micro_steps.clear()
    _sources.clear()
    _is_odd = False
    if _noted >= MAX_NOTED or _unknown >= MAX_UNKNOWN or not notes.has_room(KIND):
        _stop()
        return
    while due < _writer.step:
        due = _next(due + 1) - 1


def _next(step: int) -> int:
    """The step that is noted after this one."""
    if step < FIRST:
        return step + 1
    if step < EARLY:
        return at.next_preferred(step, EARLY_PREFERENCE)
    return at.next_preferred(step, at.EARLY_PREFERENCE if step < at.EARLY_STEPS else at.MAX_PREFERENCE)


def _is_averaged() -> bool:
    """Whether there is one model, and its gradients are averaged over all ranks."""
    models = states.known_replicas()
    return (
        len(models) == 1
        and _writer.words[at.W_WORLD_SIZE] > 1
        and compat.keeps_equal(models[0], states.world)
    )


def read(loss: Any) -> Mean | None:
    """What a loss of one value is; None if it is more than a mean or a sum and numbers that it is multiplied with."""
    node, factor = loss.grad_fn, 1.0
    for _ in range(MAX_NODES):
        if node is None:
            return None
        name, before = node.name(), node.next_functions
        if name in ("MulBackward0", "DivBackward0"):
            side = 0 if before[0][0] is not None else 1
            value = _number(compat.saved(node, ("other", "self")[side]))
            if (
                value is None
                or any(n is not None for n, _ in before[1 - side :: 2])
                or (side and name[0] == "D")
            ):
                return None  # both have a gradient, or it is divided by the loss
        elif name in ("MulBackward1", "DivBackward1"):
            side, value = 0, float(node._saved_other)
        elif name in _THROUGH or (name.startswith(("MeanBackward", "SumBackward")) and _sizes(node) == 1):
            side, value = 0, 1.0
        else:
            return _what_ends(node, name, factor)
        if not value or not isfinite(value):
            return None
        factor = factor / value if name[0] == "D" else factor * value
        node = before[side][0]
    return None


def _number(saved: Any) -> float | None:
    """The one value of a tensor that may be asked without waiting for a GPU."""
    return float(saved.item()) if saved is not None and saved.numel() == 1 and saved.is_cpu else None


def _sizes(node: Any) -> int:
    return prod(node._saved_self_sym_sizes)


def _what_ends(node: Any, name: str, factor: float) -> Mean | None:
    """The node that makes one value of many."""
    kind, is_of_targets = MEAN, False
    if name.startswith("NllLoss"):
        kind = node._saved_reduction
        items, is_of_targets = _targets(node)
    elif name in _LOSSES:
        kind, items = node._saved_reduction, prod(compat.shape_given(node) or (0,))
    elif name.startswith("MeanBackward"):
        items = _sizes(node)
    elif name.startswith("SumBackward"):
        below = node.next_functions[0][0]
        is_weighted = below is not None and below.name().startswith(("Mul", "Where", "MaskedFill"))
        kind, items = SUM, 0 if is_weighted else _sizes(node)  # of which some may not count
    else:
        return None
    if items <= 0 or kind not in (MEAN, SUM):
        return None
    return Mean(
        name.partition("Backward")[0], items, abs(factor) * (items if kind == SUM else 1), is_of_targets
    )


def _targets(node: Any) -> tuple[int, bool]:
    """(how many targets count, whether those that are left out are known); of images, how many images."""
    shape = compat.shape_given(node) or (0,)
    if len(shape) == 4 and shape[2] > 1:
        return shape[0], False
    size = 1 if len(shape) == 1 else prod(shape) // max(1, shape[1])
    if compat.saved(node, "weight") is not None:
        return size, False
    total = _number(compat.saved(node, "total_weight"))
    return (size, False) if total is None else (round(total), True)


def _after_fork() -> None:
    global due, _unknown, _noted, _is_odd
    due = _unknown = _noted = 0
    _is_odd, origin.wants_rows = False, True
    _micro_steps.clear()
    _sources.clear()


process.AFTER_FORK.append(_after_fork)
