"""Which samples does each pass over a loader give this rank? Noted for the first passes, so that ranks can be compared.

    pass begins -> its first batches' indices -> note "pass" (what is read, by which sampler, is it training?)
    pass ends   -> note "seen" (how many, which: a sketch), and "evaluated" once it is known what followed

Which samples are in a batch, taken.py knows. No torch here.
"""

from __future__ import annotations

import zlib
from itertools import chain, islice
from time import monotonic_ns
from typing import Any

from allranks.record import compat, datasets, notes, process
from allranks.record import layout as at
from allranks.record.taken import Taken

NOTED_PASSES = 3
FIRST_BATCHES = 3
MAX_INDICES = 16_384
SKETCH = 512
MAX_LOADERS = 64
_writer = process.WRITER
_loaders: dict[
    tuple[Any, ...], _Known
] = {}  # by what the script sees of them: a loader may be made anew for each pass
_bases: dict[
    str, tuple[Any, frozenset[int], str]
] = {}  # of training and evaluation: data set, samples chosen, line
_leaked = False
_waiting: Followed | None = None
batch: Any = None
"""The indices of the batch that was handed out last, as the sampler gave them; None = not known."""


class _Known:
    """A loader that was iterated before."""

    __slots__ = ("facts", "number", "passes")

    def __init__(self, number: int, facts: dict[str, Any]) -> None:
        self.number, self.passes, self.facts = number, 0, facts


class Followed:
    """One pass whose indices are noted."""

    __slots__ = (
        "asked_ns",
        "dataset",
        "drawn",
        "first",
        "first_s",
        "forwards",
        "indices",
        "is_noted",
        "known",
        "line",
        "sampler",
        "samples",
        "size",
        "sizes",
        "step",
        "taken",
    )

    def __init__(self, known: _Known, loader: Any, line: str, asked_ns: int) -> None:
        self.known, self.line, self.asked_ns, self.first_s = known, line, asked_ns, 0.0
        self.dataset, self.sampler = loader.dataset, _sampler_of(loader)
        self.step, self.forwards = _writer.step, _writer.light.micro_steps
        self.drawn = self.taken = self.samples = 0
        self.first: list[Any] = []
        self.sizes: set[int] = set()  # of the batches
        self.size = 0  # of each, once no more of their indices are wanted; then it is enough to count batches
        self.indices: list[Any] = []
        self.is_noted = False

    @property
    def is_training(self) -> bool:
        return _writer.step != self.step or _writer.light.micro_steps != self.forwards


def begin(loader: Any, line: str, asked_ns: int) -> Followed | None:
    """A pass begins, since `asked_ns`: what follows it, if it is one of the first of its loader. Never raises."""
    try:
        _what_followed()
        dataset = loader.dataset
        key = (line, id(dataset), type(dataset), datasets.length_of(dataset), type(_sampler_of(loader)))
        known = _loaders.get(key)
        if known is None:
            if len(_loaders) >= MAX_LOADERS:
                return None
            known = _loaders[key] = _Known(len(_loaders) + 1, {})
            known.facts = _facts(loader)  # if they cannot be had, not every pass tries again
        known.passes += 1
        return Followed(known, loader, line, asked_ns) if known.passes <= NOTED_PASSES else None
    except Exception:  # noqa: BLE001 - the user's loader is of a kind that is not known here
        return None


def handed(followed: Followed | None, taken: Taken, drawn: int) -> Followed | None:
    """So many batches of a pass were handed out by now; gives `followed` if there is more to see. Never raises.

    Asked for all at once: of quick steps one in 100 ms asks.
    """
    global batch
    if followed is None or followed.size:
        batch = taken.newest(drawn)
        if followed is not None and drawn > followed.drawn:
            last = len(batch) if isinstance(batch, (list, tuple)) else followed.size
            followed.samples += followed.size * (drawn - followed.drawn - 1) + last
            followed.drawn = drawn
            followed.size = min(followed.size, last or 1)  # rather too few are counted than too many
        return followed
    if drawn and not followed.drawn:
        followed.first_s = (monotonic_ns() - followed.asked_ns) / 1e9
    try:
        return _note_taken(followed, taken.until(drawn), drawn)
    except Exception as error:  # noqa: BLE001 - samplers of a kind that is not known here
        compat.step_aside("what a loader reads", error)
        return None


def _note_taken(followed: Followed, some: list[Any], drawn: int) -> Followed | None:
    """As `handed`, of the indices of all that were handed out since the last time."""
    global batch
    before, followed.drawn = followed.drawn, drawn
    if len(some) < drawn - before:
        some.insert(0, None)  # not known
    if some:
        batch = some[-1]
    lists = [list(one) if isinstance(one, (list, tuple)) else [one] for one in some]
    if before < FIRST_BATCHES:
        followed.first += chain.from_iterable(one[:128] for one in lists[: FIRST_BATCHES - before])
    followed.samples += sum(map(len, lists))
    followed.sizes.update(map(len, lists))
    if (room := MAX_INDICES - len(followed.indices)) > 0:
        followed.indices += islice(chain.from_iterable(lists), room)
    elif len(followed.sizes) == 1:  # from now on their number tells how many samples they are
        (followed.size,) = followed.sizes
    if before < FIRST_BATCHES <= drawn:
        _note_pass(followed)
    # The order is what there is to see of a later pass.
    return followed if drawn < FIRST_BATCHES or followed.known.passes == 1 else None


def ended(followed: Followed) -> None:
    """The pass came to its end; never raises."""
    global _waiting
    try:
        _note_pass(followed)
        own, training = followed.known, followed.is_training
        if own.passes <= 2:
            notes.note(
                "seen", **_where(followed), training=training, drawn=followed.drawn, **_sketch(followed)
            )
            _compare_with_other_loader(followed, training)
        if not training and own.facts.get("padded", 0) > 0:
            _waiting = followed
            followed.taken = _newest_call()
    except Exception:  # noqa: BLE001 - see begin
        return


def at_end() -> None:
    """The script is at its end."""
    _what_followed()


def _where(followed: Followed) -> dict[str, Any]:
    return {"loader": followed.known.number, "number": followed.known.passes, "line": followed.line}


def _note_pass(followed: Followed) -> None:
    if followed.is_noted:
        return
    followed.is_noted = True
    sampler = followed.sampler
    first = [i if isinstance(i, int) else zlib.crc32(_index_text(i)) for i in followed.first]
    facts = followed.known.facts if followed.known.passes == 1 else {}
    notes.note(
        "pass",
        **_where(followed),
        training=followed.is_training,
        epoch=_number(sampler, "epoch"),
        first_s=round(followed.first_s, 4),
        first=first[:16],
        count=len(first),
        hash=zlib.crc32(repr(first).encode()),
        **facts,
    )


def _index_text(index: Any) -> bytes:
    return (datasets.text_of(index) if isinstance(index, datasets.PLAIN) else repr(index)).encode(
        "utf-8", "replace"
    )


def _facts(loader: Any) -> dict[str, Any]:
    """What is read and how it is divided: of the loader's first pass."""
    dataset, sampler = loader.dataset, _sampler_of(loader)
    length = datasets.length_of(dataset)
    is_iterable = hasattr(type(dataset), "__iter__") and not hasattr(type(dataset), "__getitem__")
    replicas, total = _number(sampler, "num_replicas"), _number(sampler, "total_size")
    facts: dict[str, Any] = {
        "dataset": datasets.describe(dataset),
        "iterable": is_iterable,
        "sampler": type(sampler).__name__,
        "is_torchs": type(sampler).__module__.startswith("torch.utils.data"),
        "share": -1
        if is_iterable or sampler is getattr(loader, "batch_sampler", None)
        else datasets.length_of(sampler),
        "shuffle": bool(getattr(sampler, "shuffle", type(sampler).__name__ == "RandomSampler")),
        "replacement": bool(getattr(sampler, "replacement", False)),
        "set_epoch": callable(getattr(sampler, "set_epoch", None)),
        "num_replicas": replicas,
        "sampler_rank": _number(sampler, "rank"),
        "seed": _number(sampler, "seed"),
        "batch_size": _number(loader, "batch_size"),
        "num_workers": _number(loader, "num_workers"),
        "persistent": bool(getattr(loader, "persistent_workers", False)),
        "padded": max(0, total - length) if replicas > 1 and total > 0 and length > 0 else 0,
    }
    return facts


def _sampler_of(loader: Any) -> Any:
    """What decides the order: the innermost sampler."""
    sampler = getattr(loader, "sampler", None)
    outer = getattr(loader, "batch_sampler", None)
    if outer is not None and not type(outer).__module__.startswith("torch.utils.data"):
        return (
            getattr(outer, "sampler", None)
            if hasattr(getattr(outer, "sampler", None), "set_epoch")
            else outer
        )
    return sampler


def _number(owner: Any, name: str) -> int:
    value = getattr(owner, name, None)
    return value if isinstance(value, int) and not isinstance(value, bool) else -1


def _sketch(followed: Followed) -> dict[str, Any]:
    """How many samples, how many of them different, and those with the smallest hashes: equal samples are in every rank's."""
    kept = [i for i in followed.indices if isinstance(i, int)]
    distinct = set(kept)
    small = sorted(distinct, key=lambda i: (i * 2654435761 + 12345) % 4294967291)[:SKETCH]
    return {
        "samples": followed.samples,
        "kept": len(kept),
        "distinct": len(distinct),
        "sketch": sorted(small),
    }


def _compare_with_other_loader(followed: Followed, training: bool) -> None:
    """Samples of the same data set that are in a training loader and in an evaluation loader of this rank."""
    global _leaked
    if _leaked:
        return
    base, chosen = datasets.base_of(followed.dataset)
    if chosen is None:
        return
    kind, other = ("train", "evaluate") if training else ("evaluate", "train")
    _bases[kind] = base, frozenset(chosen), followed.line
    if other in _bases and _bases[other][0] is base:
        both = _bases[other][1] & _bases[kind][1]
        if both and len(both) < min(len(_bases[other][1]), len(_bases[kind][1])):
            _leaked = True
            train, evaluate = _bases["train"], _bases["evaluate"]
            notes.note(
                "leak", both=len(both), some=sorted(both)[:4], train=len(train[1]), evaluate=len(evaluate[1]),
                train_line=train[2], line=evaluate[2],
            )  # fmt: skip


def _newest_call() -> int:
    words = _writer.words
    return max(words[at.RING + at.SLOT_WORDS * slot] for slot in range(at.NUM_SLOTS))


def _what_followed() -> None:
    """After an evaluation with padding: were its numbers added up over the ranks, or were all results gathered (and trimmed, perhaps)?"""
    global _waiting
    followed, _waiting = _waiting, None
    if followed is None or not notes.has_room("evaluated"):
        return
    words, ops = _writer.words, []
    for slot in range(at.NUM_SLOTS):
        base = at.RING + at.SLOT_WORDS * slot
        if words[base] > followed.taken and words[base] == words[base + at.S_TAIL]:
            ops.append((words[base], _writer.name_of(words[base + at.S_OP]), words[base + at.S_NUMEL]))
    ops.sort()
    notes.note(
        "evaluated", **_where(followed), ops=[[op, numel] for _, op, numel in ops[:8]],
        length=followed.known.facts["dataset"]["length"], padded=followed.known.facts["padded"],
        num_replicas=followed.known.facts["num_replicas"], sampler_rank=followed.known.facts["sampler_rank"],
        last=followed.indices[-2:], shuffle=followed.known.facts["shuffle"],
    )  # fmt: skip


def _after_fork() -> None:
    global _waiting
    _waiting = None
    _loaders.clear()
    _bases.clear()


process.AFTER_FORK.append(_after_fork)
