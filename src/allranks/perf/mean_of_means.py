"""Do samples count unequally, since means over unequal numbers of them are averaged as if they were equal?

What ranks noted of their losses (record/weights.py) is put together step by step: a micro-batch's share of the step's weight beside its
share of the step's samples. Nothing is said where the script's factors follow the numbers, or follow something else; of the smaller
last batch of a pass; of losses of different kinds (each line of backward, or each loader, has a number of its own); or of what happens
now and then.

Samples are asked about while the job runs (watch/causes/mean_of_means.py). How many targets count, of those that a mask leaves out, differs
from batch to batch in many a job that means it so: that is a remark at the end of a run and in its report, no alarm.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from allranks.perf.values import History
from allranks.perf.view import Cause

CODE, NAME, KIND = "AR727", "samples-count-unequally", "weights"
RATIO, WRONG = 2.0, 1 / 8
"""So many times as much must one sample count as another, and so much of the weight must be with the wrong ones."""
EQUAL = 0.01
"""Weights that differ by less are taken for equal."""
LEAST, LEAST_TARGETS = 3, 6
"""So many steps must have been seen; half of them must be wrong."""
SHOWN_RANKS, SHOWN = 4, 8
FIX = (
    "weigh by count: loss = F.cross_entropy(..., reduction='sum') * world_size / n, where n counts the whole step, over all ranks "
    "(dist.all_reduce)\nor make all batches equal (drop_last=True, a sampler that cuts evenly); run.loader and run.step weigh by count"
)

Notes = Mapping[int, Sequence[Mapping[str, Any]]]


@dataclass(frozen=True, slots=True)
class Part:
    """One micro-batch of a step."""

    rank: int
    count: int
    weight: float
    line: str
    source: int  # of several lines or loaders within the step
    is_last: bool  # of a pass over the loader


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step of all ranks."""

    number: int
    op: str
    parts: tuple[Part, ...]

    @property
    def counted(self) -> list[Part]:
        """Without the smaller last batch of a pass."""
        most = max(p.count for p in self.parts)
        return [p for p in self.parts if not (p.is_last and p.count < most)]

    @property
    def ratio(self) -> float:
        """How many times as much one sample counts as another."""
        each = [p.weight / p.count for p in self.counted]
        return max(each) / min(each) if each else 1.0

    @property
    def wrong(self) -> float:
        """The share of the weight that is with the wrong samples."""
        known = self.counted
        weight, count = sum(p.weight for p in known), sum(p.count for p in known)
        return sum(abs(p.weight / weight - p.count / count) for p in known) / 2 if known else 0.0

    @property
    def is_each_equal(self) -> bool:
        """Whether each micro-batch counts the same."""
        return _are_equal(p.weight for p in self.parts)

    @property
    def is_mean_of_means(self) -> bool:
        """Whether each micro-batch counts the same, or else each rank."""
        ranks = [[p for p in self.parts if p.rank == rank] for rank in {p.rank for p in self.parts}]
        return self.is_each_equal or (
            _are_equal(sum(p.weight for p in own) for own in ranks)
            and all(
                _are_equal(p.weight for p in own) or _are_equal(p.weight / p.count for p in own)
                for own in ranks
            )
        )

    @property
    def is_bad(self) -> bool:
        return self.ratio >= RATIO and self.wrong >= WRONG and self.is_mean_of_means


@dataclass(frozen=True, slots=True)
class Found:
    """What is wrong, by the most usual of the steps that are."""

    step: Step
    num_bad: int
    num_seen: int
    unit: str  # "sample" or "target"

    def title(self) -> str:
        """What is wrong, without the ranks."""
        parts, totals = self.step.counted, self._totals()
        what = "micro-batch" if len(parts) > len(totals) else "rank's batch"
        counts = sorted({p.count for p in parts})
        if not self.step.is_each_equal:
            what, counts = "rank", sorted(set(totals.values()))
        return (
            f"each {what} counts the same, of {counts[0]} {self.unit}s or of {counts[-1]}: "
            f"one {self.unit} counts up to {self.step.ratio:.3g} times as much as another"
        )

    def facts(self) -> list[str]:
        """The numbers of one step, and how often."""
        step, totals = self.step, self._totals()
        own = [
            f"{_counts([p.count for p in step.parts if p.rank == rank])} on rank {rank}"
            for rank in [*totals][:SHOWN_RANKS]
        ]
        rest = f", and {len(totals) - SHOWN_RANKS} ranks more" if len(totals) > SHOWN_RANKS else ""
        weights = sorted({p.weight for p in step.parts})
        times = "" if weights == [1.0] else f", times {' or '.join(f'{w:.4g}' for w in weights[:3])}"
        return [
            f"in step {step.number}: {self.unit}s in each mean ({step.op}{times}): {', '.join(own)}{rest}",
            f"{step.wrong:.0%} of the step's weight is with the wrong {self.unit}s: its gradient is not that of all "
            f"{sum(totals.values())} together; so in {self.num_bad} of {self.num_seen} steps that were looked at",
        ]

    def lines(self) -> list[str]:
        """Where backward is called."""
        return list(dict.fromkeys(p.line for p in self.step.parts if p.line))[:2]

    def ranks(self) -> list[int]:
        return [*self._totals()]

    def _totals(self) -> dict[int, int]:
        """Rank -> what it has in the step."""
        return {
            rank: sum(p.count for p in self.step.parts if p.rank == rank)
            for rank in sorted({p.rank for p in self.step.parts})
        }


def find(noted: Notes, world_size: int, *, is_of_targets: bool = False) -> Found | None:
    """What is wrong with the weights of samples, or of targets that a mask may leave out; None if nothing is.

    Args:
        noted: By rank, what it noted of its losses.
    """
    if world_size < 2 or len(noted) < world_size:
        return None
    steps = [step for number in _common(noted) if (step := _step(noted, number, is_of_targets)) is not None]
    bad = sorted((s for s in steps if s.is_bad), key=lambda s: s.wrong)
    least = LEAST_TARGETS if is_of_targets else LEAST
    if len(steps) < least or 2 * len(bad) < len(steps) or _are_of_kinds(steps):
        return None
    return Found(bad[len(bad) // 2], len(bad), len(steps), "target" if is_of_targets else "sample")


def _common(noted: Notes) -> list[int]:
    """The steps that all ranks noted."""
    numbers = [{int(n["step"]) for n in own} for own in noted.values()]
    return sorted(set.intersection(*numbers))


def _step(noted: Notes, number: int, is_of_targets: bool) -> Step | None:
    own = {rank: next(n for n in some if n["step"] == number) for rank, some in sorted(noted.items())}
    kinds = {(str(note["op"]), bool(note["targets"])) for note in own.values()}
    per_sample = {k for note in own.values() for k in _values_per_sample(note)}
    if len(kinds) != 1:
        return None
    op, has_targets = kinds.pop()
    if not (has_targets if is_of_targets else len(per_sample) == 1 and 0 not in per_sample):
        return None
    parts = tuple(
        Part(
            rank, items if is_of_targets else rows, weight, str(note["lines"][source]), source, bool(is_last)
        )
        for rank, note in own.items()
        for source, rows, _, items, weight, is_last in note["rows"]
    )
    return Step(number, op, parts) if len(parts) > 1 else None


def _values_per_sample(note: Mapping[str, Any]) -> set[int]:
    """How many values of the mean belong to one sample; {0} if it is not known how many samples there were."""
    rows = note["rows"]
    drawn = {batch for _, _, batch, _, _, _ in rows}
    is_drawn = all(batch in (0, size) for _, size, batch, _, _, _ in rows)
    is_cut = drawn == {sum(size for _, size, *_ in rows)}  # one batch of the loader, in pieces
    if not is_drawn and not is_cut:
        return {0}
    return {items // size if size and items % size == 0 else 0 for _, size, _, items, _, _ in rows}


def _are_of_kinds(steps: Iterable[Step]) -> bool:
    """Whether each of several lines or loaders has one number of its own: labelled and unlabelled samples, or tasks."""
    counts: dict[tuple[str, int], set[int]] = {}
    for part in (p for step in steps for p in step.parts):
        counts.setdefault((part.line, part.source), set()).add(part.count)
    return len(counts) > 1 and all(len(some) == 1 for some in counts.values())


def _are_equal(values: Iterable[float]) -> bool:
    some = sorted(values)
    return some[-1] - some[0] <= EQUAL * some[-1]


def _counts(some: list[int]) -> str:
    """'2 and 30', '8 (3 times)'."""
    if len(some) > 1 and all(a == b for a, b in pairwise(some)):
        return f"{some[0]} ({len(some)} times)"
    shown = [str(n) for n in some[:SHOWN]] + (["..."] if len(some) > SHOWN else [])
    return " and ".join(([", ".join(shown[:-1])] if len(shown) > 1 else []) + shown[-1:])


# --- targets, at the end of a run ---


def facts_of(noted: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What a rank noted of losses whose targets may be left out, as a fact of the timeline."""
    some = [
        {k: v for k, v in note.items() if k != "kind"}
        for note in noted
        if note.get("kind") == KIND
        and note.get("targets")
        and any(items != size for _, size, _, items, _, _ in note["rows"])
    ]
    return {KIND: some} if some else {}


def find_remarks(history: History) -> list[Cause]:
    """One at the most, of targets."""
    noted = {r.rank: r.facts[KIND] for r in history.ranks if r.facts.get(KIND)}
    found = find(noted, history.world_size, is_of_targets=True)
    if found is None:
        return []
    where = [f"backward at {line.rpartition('/')[2]}" for line in found.lines()]
    facts = (*found.facts(), *where)
    return [
        Cause(
            CODE,
            NAME,
            f"likely: {found.title()}",
            FIX.replace("\n", " "),
            tuple(found.ranks()),
            0.0,
            0.0,
            facts,
        )
    ]
