"""Where do two recordings part? Pure: recordings in, the first update in which something differs out.

An update of one rank is compared with the updates of many ranks put together: their samples, losses and layer outputs are added up,
their gradients and weights must be the same on every rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from allranks.parity.recording import Layer, Loss, Print, RankRecord, Recording, Step

# By what computed: how far rounding may carry two gradients apart, relative to their norm, over some tens of updates. What counts
# is not the rounding of sums (1e-6 in float32) but a unit that it turns on or off at a kink: one ReLU of a small convolutional
# network made 2e-3 in the 13th update, and bfloat16 a tenth in the 16th. The mistakes that are looked for are larger: a factor of
# ranks, a mean of means; samples, rates and ranks that differ are seen exactly.
TOLERANCES = {"float64": 1e-9, "float32": 1e-2, "half": 0.1}
# Sums over many outputs hide what happens to each: they are held to a part of the tolerance.
LAYERS = 1e-3
EPSILONS = {"float64": 2.0**-52, "float32": 2.0**-23, "half": 2.0**-8}


@dataclass(frozen=True, slots=True)
class Gap:
    """A relative difference, and where it was seen."""

    size: float = 0.0
    update: int = 0
    tensor: str = ""

    def or_larger(self, size: float, update: int, tensor: str) -> Gap:
        return Gap(size, update, tensor) if size > self.size else self


@dataclass(slots=True)
class Case:
    """One update, on one rank and on many, with all in which they differ."""

    number: int
    one: Step
    many: list[Step]
    world_size: int
    tolerance: float
    one_record: RankRecord
    many_records: list[RankRecord]
    gradients: list[str] = field(default_factory=list)
    weights: list[str] = field(default_factory=list)
    buffers: list[str] = field(default_factory=list)
    among_ranks: dict[str, int] = field(default_factory=dict)
    """Tensors that differ between ranks of the one run, with the first rank that differs from rank 0."""

    @property
    def differs(self) -> bool:
        """Whether anything does."""
        named = self.gradients or self.weights or self.buffers or self.among_ranks
        # A loss may be scaled before backward (by shares of samples, by ranks): what counts is the gradient it gives.
        loss = self.loss_differs and not self.one.gradients
        return bool(named or loss or self.samples_differ or self.rates_differ or self.calls_differ)

    @property
    def one_ids(self) -> Counter[Any]:
        return ids_of([self.one])

    @property
    def many_ids(self) -> Counter[Any]:
        return ids_of(self.many)

    @property
    def samples_differ(self) -> bool:
        return self.one_ids != self.many_ids

    @property
    def one_loss(self) -> float | None:
        return mean_loss(self.one.losses)

    @property
    def many_loss(self) -> float | None:
        return mean_loss([loss for step in self.many for loss in step.losses])

    @property
    def loss_differs(self) -> bool:
        return not close(self.one_loss, self.many_loss, self.tolerance)

    @property
    def rates_differ(self) -> bool:
        return any(
            len(step.rates) != len(self.one.rates)
            or any(not close(a, b, 1e-6) for a, b in zip(step.rates, self.one.rates, strict=True))
            for step in self.many
        )

    @property
    def calls_differ(self) -> bool:
        """Whether ranks went backward different numbers of times for this update."""
        return len({len(step.losses) for step in self.many}) > 1

    @property
    def first_layer(self) -> tuple[Layer, Layer] | None:
        """The first layer, in the order of the forward, whose outputs differ."""
        theirs, allowed = add_layers(self.many), self.tolerance * LAYERS
        for layer in self.one.layers:
            other = theirs.get(layer.name)
            if other is None or other.count != layer.count:
                continue  # padded to another length: the sums cannot be compared
            spread = (layer.count * max(layer.squares, other.squares)) ** 0.5
            apart = abs(layer.sum - other.sum) > allowed * spread
            pairs = ((layer.squares, other.squares), (layer.absolute, other.absolute))
            if apart or not all(close(a, b, allowed) for a, b in pairs):
                return layer, other
        return None


@dataclass(slots=True)
class Comparison:
    """What came out."""

    updates: int
    """Updates that were compared."""
    equal_updates: int
    """Those before the first difference."""
    largest: Gap
    """The largest relative difference of a tensor of weights, in the updates that are equal."""
    largest_gradient: Gap
    case: Case | None = None
    initial: dict[str, int] = field(default_factory=dict)
    """Tensors that differ before the first update, with the rank (of many) that holds another."""
    counts: tuple[int, int] = (0, 0)
    """Updates recorded on one rank and on many."""
    losses: tuple[list[float | None], list[float | None]] = ((), ())  # type: ignore[assignment]
    tolerance: float = 0.0


def compare(one: Recording, many: Recording, tolerance: float | None = None) -> Comparison:
    """Compare update by update until something differs."""
    kind = kind_of(one.ranks[0])
    allowed = TOLERANCES[kind] if tolerance is None else tolerance
    count = min(one.num_updates, many.num_updates)
    result = Comparison(count, 0, Gap(), Gap(), tolerance=allowed)
    result.counts = (one.num_updates, many.num_updates)
    result.losses = (
        [mean_loss(step.losses) for step in one.ranks[0].steps],
        [
            mean_loss([loss for rank in many.ranks for loss in rank.steps[k].losses])
            for k in range(many.num_updates)
        ],
    )
    result.initial = _initial_differences(one, many, allowed)
    if result.initial:
        return result
    for k in range(count):
        case, weights, gradient = _compare_update(one, many, k, allowed, EPSILONS[kind])
        if case.differs:
            result.case = case
            return result
        result.equal_updates = k + 1
        result.largest = result.largest.or_larger(*weights)
        result.largest_gradient = result.largest_gradient.or_larger(*gradient)
    return result


def kind_of(record: RankRecord) -> str:
    """In which precision the run computed: "float64", "float32" or "half"."""
    if record.autocast in ("float16", "bfloat16"):
        return "half"
    dtypes = {p.dtype for p in record.initial.values()}
    if dtypes & {"float16", "bfloat16"}:
        return "half"
    return "float64" if dtypes == {"float64"} else "float32"


def _initial_differences(one: Recording, many: Recording, allowed: float) -> dict[str, int]:
    found: dict[str, int] = {}
    reference = one.ranks[0].initial
    for record in many.ranks:
        for name, theirs in record.initial.items():
            mine = reference.get(name)
            if mine is not None and mine.distance(theirs) > allowed * max(mine.norm, theirs.norm):
                found.setdefault(name, record.rank)
    return found


def _compare_update(
    one: Recording, many: Recording, k: int, allowed: float, epsilon: float
) -> tuple[Case, tuple[float, int, str], tuple[float, int, str]]:
    record = one.ranks[0]
    mine, theirs = record.steps[k], [rank.steps[k] for rank in many.ranks]
    case = Case(k + 1, mine, theirs, many.world_size, allowed, record, many.ranks)
    case.among_ranks = _among_ranks(theirs, allowed)
    floor = _floor(mine.gradients)
    gradient = weight = (0.0, k + 1, "")
    for name, a in mine.gradients.items():
        b = theirs[0].gradients.get(name)
        size = (
            float("inf")
            if b is None
            else a.distance(b) / max(a.norm, b.norm, floor(a))
            if a.norm or b.norm
            else 0.0
        )
        gradient = max(gradient, (size, k + 1, name))
        if size > allowed:
            case.gradients.append(name)
    case.gradients += [name for name in theirs[0].gradients if name not in mine.gradients]
    for name, a in mine.weights.items():
        b = theirs[0].weights.get(name)
        if b is None:
            continue
        distance = a.distance(b)
        weight = max(weight, (distance / a.norm if a.norm else distance, k + 1, name))
        start = record.initial.get(name)
        way = a.distance(start) if start is not None else a.norm
        if distance > 5 * allowed * way + 16 * epsilon * max(a.norm, b.norm) and not _is_noise(
            mine, name, floor
        ):
            case.weights.append(name)
    for name, a in mine.buffers.items():
        b = theirs[0].buffers.get(name)
        if b is not None and a.distance(b) > allowed * max(a.norm, b.norm):
            case.buffers.append(name)
    return case, weight, gradient


def _floor(gradients: Mapping[str, Print]) -> Any:
    """A norm below which a gradient is small against all others: a hundredth of the usual entry."""
    squares = sum(p.squares for p in gradients.values())
    entries = sum(p.numel for p in gradients.values()) or 1
    usual = (squares / entries) ** 0.5
    return lambda p: 1e-2 * usual * p.numel**0.5


def _is_noise(step: Step, name: str, floor: Any) -> bool:
    """Whether a gradient is nothing but rounding (a bias before batch norm): an adaptive optimizer makes steps of either sign of it."""
    gradient = step.gradients.get(name)
    return gradient is not None and gradient.norm < 1e-3 * floor(gradient)


def _among_ranks(steps: list[Step], allowed: float) -> dict[str, int]:
    """Tensors that are not the same on all ranks, whose gradients were averaged and whose weights were updated alike."""
    found: dict[str, int] = {}
    for rank, step in enumerate(steps[1:], 1):
        for tensors, others in ((steps[0].gradients, step.gradients), (steps[0].weights, step.weights)):
            for name, a in tensors.items():
                b = others.get(name)
                if b is None or a.distance(b) > 1e-2 * allowed * max(a.norm, b.norm):
                    found.setdefault(name, rank)
            for name in others:
                if name not in tensors:
                    found.setdefault(name, rank)
    return found


def ids_of(steps: list[Step]) -> Counter[Any]:
    """How often each sample was seen in an update, over all ranks."""
    return Counter((batch.loader, i) for step in steps for batch in step.batches for i in batch.ids)


def mean_loss(losses: Any) -> float | None:
    """The mean over all samples (or the sum over all weights) of the losses of an update."""
    kept: list[Loss] = [loss for loss in losses if loss.weight]
    weight = sum(loss.weight for loss in kept)
    if not weight:
        return None
    return sum(loss.value if loss.is_sum else loss.value * loss.weight for loss in kept) / weight


def add_layers(steps: list[Step]) -> dict[str, Layer]:
    """The layers' outputs of all ranks together."""
    found: dict[str, Layer] = {}
    for step in steps:
        for x in step.layers:
            a = found.get(x.name, Layer(x.name, x.kind, 0, 0.0, 0.0, 0.0))
            sums = (a.sum + x.sum, a.squares + x.squares, a.absolute + x.absolute)
            found[x.name] = Layer(x.name, x.kind, a.count + x.count, *sums)
    return found


def close(a: float | None, b: float | None, tolerance: float) -> bool:
    """Equal within a relative tolerance; two NaNs and two missing values are equal."""
    if a is None or b is None:
        return a is b
    if a != a or b != b:
        return a != a and b != b
    return a == b or abs(a - b) <= tolerance * max(abs(a), abs(b))
