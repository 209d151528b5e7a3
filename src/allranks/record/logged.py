"""Is a number that a script logs on this rank the rank's own, though it is read as the job's?

    the own loss     what is logged is the loss that backward was called on, or a mean of such losses: 2 or 3 times, while they vary
    the own share    it is logged after an evaluation of this rank's share of a data set, and no collective was called since its first batch

Seen are the loggers that scripts call themselves: add_scalar(s) of tensorboard's SummaryWriter, wandb's Run.log, mlflow's log_metric(s),
and run.log of allranks. Their time is that of logging.
Each rank notes which names it logs, and perf/own_values.py asks whether it is the only one. A call costs a look-up once its name is
decided; losses are followed, for a limited number of quick steps, only where a logger is in use (losses.py). No torch here.
"""

from __future__ import annotations

import functools
import re
from _thread import get_ident
from collections.abc import Callable, Iterable, Mapping
from math import isfinite
from typing import Any

from allranks.record import layout as at
from allranks.record import losses, notes, process, states

_writer, _lines = process.WRITER, process.LINES
MAX_NAMES, MAX_TRIES = 32, 12
QUICK_LOOKS = 1024
"""So many losses of quick steps are looked at for this; of longer steps all are looked at anyway."""
TOLERANCE = 3e-6
"""Of a mean that was added up in float32."""
VARIES = 1e-3
"""Losses must differ by so much of themselves: of a constant anything is a multiple."""
MANY, FEW = 3, 2
"""Calls that must agree: where the value is a multiple of the loss (scaled, or divided for accumulation); where it is the loss."""
_METRICS = (
    "val valid validation eval evaluation test dev held heldout acc accuracy f1 auc auroc map bleu rouge precision recall iou miou "
    "score ppl perplexity wer psnr ssim mae rmse"
)
_OTHERS = (
    "train training lr learning time sec seconds speed epoch step steps size count num samples tokens memory"
)


class _Name:
    """What a script logs under one name."""

    __slots__ = ("at", "is_done", "seen", "since", "tries")

    def __init__(self) -> None:
        self.is_done, self.tries = False, 0
        self.at: tuple[int, int, float] = (
            0,
            0,
            0.0,
        )  # losses until then, and the value: two loggers may be given the same
        self.seen: list[tuple[float, dict[str, float]]] = []  # value, and the losses that it may be
        self.since: tuple[int, int, float] = (0, 0, 0.0)  # of the call before: as _Losses.now


class _Losses:
    """The losses of this rank since a logger was called."""

    def __init__(self) -> None:
        self.generation = self.count = self.number = self.step = 0
        self.total = 0.0
        self.left = QUICK_LOOKS
        self.recent: list[float] = []
        self.pass_began: tuple[int, int, float] = (-1, 0, 0.0)
        self.waiting: list[dict[str, float]] = []

    def now(self) -> tuple[int, int, float]:
        """What a mean is made of: (stretch without a gap, how many, their sum)."""
        return self.generation, self.count, self.total

    def mean_since(self, before: tuple[int, int, float]) -> float | None:
        """The mean of two losses or more; None if one of them was not seen."""
        generation, count, total = before
        many = self.count - count
        return (self.total - total) / many if generation == self.generation and many > 1 else None

    def see(self, value: float | None) -> None:
        """Backward was called on a loss; None: its value is not known. Never raises."""
        step, number = _writer.step, _writer.words[at.LOADER + at.L_NUMBER]
        if value is None or not isfinite(value) or not self.step <= step <= self.step + 1:
            self.generation += 1
            self.recent.clear()
        self.step = step
        if value is None or not isfinite(value):
            self.waiting.clear()
            return
        if number != self.number:
            self.number, self.pass_began = number, self.now()
        self.count, self.total = self.count + 1, self.total + value
        self.recent = [*self.recent[-3:], value]
        for found in self.waiting:
            found["next"] = value
        self.waiting.clear()
        if states.is_quick:
            self.left -= 1
        if self.left <= 0 or all(one.is_done for one in _names.values()):
            losses.following(None)


_names: dict[str, _Name] = {}
_losses = _Losses()
_shares: dict[
    tuple[str, int], tuple[int, int] | None
] = {}  # by line and length of a loop: (samples of this rank, of all)


def mark_tensorboard(module: Any) -> None:
    """torch.utils.tensorboard.SummaryWriter, and tensorboardX's."""
    kind = module.SummaryWriter
    kind.add_scalar = _marked(kind.add_scalar, "SummaryWriter.add_scalar", _scalar)
    kind.add_scalars = _marked(kind.add_scalars, "SummaryWriter.add_scalars", _scalars)


def mark_wandb(module: Any) -> None:
    """wandb.log is the method of the run that wandb.init began."""
    module.Run.log = _marked(module.Run.log, "wandb.log", lambda _, data: _flat(data))


def mark_mlflow(module: Any) -> None:
    """The functions that mlflow hands on by these names."""
    module.log_metric = _marked(module.log_metric, "mlflow.log_metric", lambda key, value: [(key, value)])
    module.log_metrics = _marked(module.log_metrics, "mlflow.log_metrics", _flat)


def mark_run_log(module: Any) -> None:
    """What every run.log writes to."""
    kind = module.JsonLines
    kind.log = _marked(kind.log, "run.log", lambda _, values: _flat(values))


def _scalar(_: Any, tag: str, scalar_value: Any) -> Iterable[tuple[str, Any]]:
    return [(tag, scalar_value)]


def _scalars(_: Any, main_tag: str, tag_scalar_dict: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    return [(f"{main_tag}/{tag}", value) for tag, value in tag_scalar_dict.items()]


def _flat(metrics: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}.{inner}", own) for inner, own in value.items())
        else:
            yield name, value


_VALUES = {"tag", "scalar_value", "main_tag", "tag_scalar_dict", "data", "key", "value", "metrics", "values"}


def _marked(log: Callable[..., Any], call: str, values: Callable[..., Iterable[tuple[str, Any]]]) -> Any:
    count = values.__code__.co_argcount

    @functools.wraps(log)
    def marked(*args: Any, **kwargs: Any) -> Any:
        if get_ident() != _writer.owner:
            return log(*args, **kwargs)
        before = _writer.mark(at.LOG | _lines.here())
        try:
            result = log(*args, **kwargs)  # first: it waits for a GPU where the value is there
        finally:
            _writer.mark(before)
        if _writer.words[at.W_WORLD_SIZE] > 1:
            try:
                _see(values(*args[:count], **{k: v for k, v in kwargs.items() if k in _VALUES}), call)
            except Exception:  # noqa: BLE001 - a look is not worth the user's step
                losses.following(None)
        return result

    return marked


def _see(values: Iterable[tuple[str, Any]], call: str) -> None:
    for name, value in values:
        one = _names.get(name)
        if one is None:
            if len(_names) >= MAX_NAMES:
                return
            one = _names[name] = _Name()
            notes.note("logs", name=name)
        if one.is_done or (number := _number(value)) is None:
            continue
        if one.at == (now := (*_losses.now()[:2], number)):
            continue
        one.at, one.tries = now, one.tries + 1
        found = _after_evaluation(name) or _as_loss(one, number)
        if found is not None:
            line = _writer.name_of(_lines.here() >> 8)
            notes.note("logged", name=name, call=call, line=line, value=number, step=_writer.step, **found)
        one.is_done = found is not None or one.tries >= MAX_TRIES


def _number(value: Any) -> float | None:
    """A finite number that is not a count; else None."""
    if not isinstance(value, float):
        if isinstance(value, int) or not hasattr(value, "item"):
            return None
        value = value.item()
    return value if isinstance(value, float) and isfinite(value) else None


# --- the own loss ---


def _as_loss(one: _Name, value: float) -> dict[str, Any] | None:
    """Whether this and the calls before logged the losses of this rank."""
    if losses.which == losses.NEVER:
        return None
    if losses.follow is None and _losses.left > 0:
        _losses.generation += 1  # what came before was not seen
        _losses.recent.clear()
        _losses.step = _writer.step
        losses.following(_losses.see)
    if losses.follow is None:
        return None
    losses.settle()
    found = {f"last {k}": loss for k, loss in enumerate(reversed(_losses.recent))}
    for key, before in (("mean", one.since), ("pass", _losses.pass_began)):
        if (mean := _losses.mean_since(before)) is not None:
            found[key] = mean
    one.since = _losses.now()
    one.seen = [*one.seen[-MANY:], (value, found)]
    _losses.waiting.append(found)
    return _fitting(one.seen)


def _fitting(seen: list[tuple[float, dict[str, float]]]) -> dict[str, Any] | None:
    """Which of the losses is logged each time; None if none is, or it may be chance."""
    for key in ("last 0", "last 1", "last 2", "last 3", "next", "mean", "pass"):
        pairs = [(value, found[key]) for value, found in seen if found.get(key)]
        for least in (FEW, MANY):
            some = pairs[-least:]
            ratios = [value / loss for value, loss in some]
            scale = 1.0 if least == FEW else ratios[0] if ratios else 0.0
            is_scale = len(some) == least and all(abs(r - scale) <= TOLERANCE * abs(scale) for r in ratios)
            if is_scale and scale and _vary([loss for _, loss in some]):
                how = "mean" if key in ("mean", "pass") else "loss"
                return {"how": how, "own": some[-1][1], "scale": scale}
    return None


def _vary(some: list[float]) -> bool:
    least = VARIES * max(map(abs, some))
    return all(abs(a - b) > least for k, a in enumerate(some) for b in some[:k])


# --- the own share ---


def _after_evaluation(name: str) -> dict[str, Any] | None:
    """Whether this rank has just evaluated its share, and nothing was exchanged since."""
    if not _is_evaluated(name):
        return None
    words, loader = _writer.words, at.LOADER
    began, step = words[loader + at.L_STARTED_NS], _writer.step
    if not _writer.light.drawn or not words[loader + at.L_ENDED_NS]:
        return None
    if step and words[at.STEP_ENDS + step % at.NUM_STEP_ENDS] > began:
        return None  # it was a pass of training, or one came after it
    if _has_exchanged_since(began):
        return None
    loop, drawn = _writer.name_of(words[loader + at.L_LINE]), _writer.light.drawn
    if (loop, drawn) not in _shares:
        _shares[loop, drawn] = _share_of(loop, drawn)
    share = _shares[loop, drawn]
    return {"how": "evaluation", "loop": loop, "share": share[0], "length": share[1]} if share else None


def _is_evaluated(name: str) -> bool:
    """Whether a name says that it is of an evaluation, or a metric: "valLoss", "mIoU", "val/acc@5"."""
    apart = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    words = {
        w
        for word in re.split(r"[^a-z0-9]+", f"{name} {apart}".lower())
        for w in (word, word.rstrip("0123456789"))
    }
    return not words.isdisjoint(_METRICS.split()) and words.isdisjoint(_OTHERS.split())


def _has_exchanged_since(began_ns: int) -> bool:
    """Whether the script called a collective; a barrier counts, too: ranks may hand their results over in files."""
    words = _writer.words
    slots = (at.RING + at.SLOT_WORDS * slot for slot in range(at.NUM_SLOTS))
    return any(words[base] and words[base + at.S_ENTERED] > began_ns for base in slots)


def _share_of(loop: str, drawn: int) -> tuple[int, int] | None:
    """(samples of this rank, of the data set) in a pass of so many batches that began at this line; None if it is no share."""
    noted = [n for n in notes.read_notes(_writer.path or "") if n.get("line") == loop]
    ended = [n for n in noted if n["kind"] == "seen" and n["drawn"] == drawn]
    facts = {n["loader"]: n for n in noted if n["kind"] == "pass" and "num_replicas" in n}
    if any(n["training"] for n in ended):
        return None
    # Loaders may share a line, in a function for all evaluations: then those of this length must all be shares.
    found = [_share(facts[n["loader"]]) for n in ended if n["loader"] in facts]
    return found[-1] if found and None not in found else None


def _share(facts: Mapping[str, Any]) -> tuple[int, int] | None:
    world, rank = _writer.words[at.W_WORLD_SIZE], _writer.words[at.W_RANK]
    length, share = int((facts.get("dataset") or {}).get("length", -1)), int(facts.get("share", -1))
    is_divided = facts["num_replicas"] == world and facts["sampler_rank"] == rank
    is_part = 0 < share < length and abs(share * world - length) < world
    return (share, length) if 0 < share < length and (is_divided or is_part) else None


def _after_fork() -> None:
    global _losses
    losses.following(None)
    _losses = _Losses()
    _names.clear()
    _shares.clear()


process.AFTER_FORK.append(_after_fork)
