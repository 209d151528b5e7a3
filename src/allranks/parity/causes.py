"""Why do one rank and many part? One function for each cause of the catalogue, in the order in which an update happens.

Each looks at the first update that differs and gives its finding, or None; the first finding is the cause.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from allranks.parity.compare import Case

SHOWN = 6
"""Names or indices that a message lists."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One cause, found in one update."""

    code: str
    what: str
    why: str
    fix: str
    update: int
    tensor: str = ""
    rank: int | None = None


def listed(things: Iterable[Any]) -> str:
    """The first few, and how many more."""
    every = list(things)
    more = f" and {len(every) - SHOWN} more" if len(every) > SHOWN else ""
    return ", ".join(str(thing) for thing in every[:SHOWN]) + more


def update_skipped(case: Case) -> Finding | None:
    """A rank that did not make the last update has two batches in this one."""
    if not case.calls_differ:
        return None
    counts = [len(step.losses) for step in case.many]
    usual = Counter(counts).most_common(1)[0][0] if counts.count(counts[0]) != 1 else min(counts)
    rank = next(r for r, n in enumerate(counts) if n != usual)
    return Finding(
        "AR712",
        f"rank {rank} went backward {_times(counts[rank])} for update {case.number}, the others {_times(usual)}",
        "it left out an optimizer step that other ranks made: a decision taken from its own loss or gradient",
        "decide together: skip = run.any(not torch.isfinite(loss)), and skip on all ranks or on none",
        case.number,
        rank=rank,
    )


def _times(n: int) -> str:
    return f"{n} time{'s' * (n != 1)}"


def never_synchronised(case: Case) -> Finding | None:
    """Gradients that differ between ranks after the backward that should have averaged them."""
    if not case.among_ranks:
        return None
    names, every = list(case.among_ranks), list(case.one.weights)
    rank = case.among_ranks[names[0]]
    if len(names) >= len(every):
        why = "no gradient was averaged: likely the forward was called on the module inside DDP, or under no_sync"
        fix = "call what DistributedDataParallel (or run.model) returned; the last micro-batch of a window outside no_sync"
    else:
        why = "they are not among what was averaged: likely they were frozen, or not yet there, when DDP was built"
        fix = "build DDP after everything that trains requires a gradient; run.model follows later changes by itself"
    what = f"{len(names)} of {len(every)} parameters differ between ranks after update {case.number}: {listed(names)}"
    return Finding("AR710", what, why, fix, case.number, names[0], rank)


def samples(case: Case) -> Finding | None:
    """Other samples than on one rank."""
    if not case.samples_differ:
        return None
    one, many = case.one_ids, case.many_ids
    repeated, missing = many - one, one - many
    num_one, num_many = one.total(), many.total()
    twice = [key for key, count in many.items() if count > 1 and one[key] <= 1]
    if num_one == num_many and not twice:
        return Finding(
            "AR703",
            f"update {case.number} sees {num_many} samples as on one rank, but other ones: "
            f"{listed(_numbers(repeated))} instead of {listed(_numbers(missing))}",
            "the order depends on the number of ranks: likely a shuffle seeded by the rank or the world size, or "
            "another sampler with one rank",
            "one seed for the order on all ranks and in all runs; run.loader(data, shuffle=True) does so",
            case.number,
        )
    ratio = Fraction(num_many, num_one) if num_one else Fraction(0)
    if not twice and case.number == 1 and (ratio == case.world_size or not repeated or not missing):
        return Finding(
            "AR702",
            f"update {case.number} sees {num_many} samples on {case.world_size} ranks and {num_one} on one",
            "the global batch depends on the number of ranks: the batch size in the script is one rank's",
            "global_batch_size in run.loader, or batch_size = global batch // world_size for each rank",
            case.number,
        )
    parts = []
    if repeated:
        ranks = sorted({r for r, step in enumerate(case.many) for b in step.batches if _has(b, repeated)})
        on = f"rank{'s' * (len(ranks) != 1)} {listed(ranks)}"
        parts.append(f"{listed(_numbers(repeated))} more often than on one rank (seen by {on})")
    if missing:
        parts.append(
            f"{listed(_numbers(missing))} not at all"
            if not (missing & many)
            else f"{listed(_numbers(missing))} less often"
        )
    everyone = bool(twice) and all(one[key] == 1 and count == case.world_size for key, count in many.items())
    return Finding(
        "AR701",
        f"update {case.number} sees samples {'; and '.join(parts)}",
        "every rank goes through the same samples: the loader does not divide them"
        if everyone
        else "likely DistributedSampler, which repeats samples until every rank has as many, or drops the rest",
        "sampler=DistributedSampler(data), or run.loader(data, shuffle=True)"
        if everyone
        else "run.loader(data): uneven shares, weighted exactly",
        case.number,
    )


def _has(batch: Any, wanted: Counter[Any]) -> bool:
    return any((batch.loader, i) in wanted for i in batch.ids)


def _numbers(ids: Counter[Any]) -> list[Any]:
    return sorted((i for _, i in ids), key=lambda i: (str(type(i)), i))


def augmentation(case: Case) -> Finding | None:
    """The same samples with other contents."""
    contents: dict[Any, tuple[int, str]] = {}
    for batch in case.one.batches:
        if batch.indices is not None and batch.hashes is not None:
            contents |= {
                (batch.loader, i): (h, batch.shape) for i, h in zip(batch.indices, batch.hashes, strict=False)
            }
    changed = []
    for rank, step in enumerate(case.many):
        for batch in step.batches:
            if batch.indices is None or batch.hashes is None:
                continue
            for i, h in zip(batch.indices, batch.hashes, strict=False):
                mine = contents.get((batch.loader, i))
                if mine is not None and mine[1] == batch.shape and mine[0] != h:
                    changed.append((i, rank))
    if not changed:
        return None
    return Finding(
        "AR705",
        f"update {case.number}: {len(changed)} of {case.many_ids.total()} samples have another content than on one rank: "
        f"{listed(sorted({i for i, _ in changed}))}",
        "random numbers in the data set or the collate function come from a stream that depends on rank or worker",
        "run.loader seeds augmentation by the sample's place in the epoch; or switch augmentation off to compare",
        case.number,
        rank=changed[0][1],
    )


def forward(case: Case) -> Finding | None:
    """The first layer whose outputs, added up over all ranks, are not those of one rank."""
    if not case.loss_differs and case.first_layer is None:
        return None
    found = case.first_layer
    kind = found[0].kind if found is not None else ""
    name = found[0].name if found is not None else ""
    dropouts = sorted({name for step in [case.one, *case.many] for name in step.dropouts})
    layers = {layer.name for layer in case.one.layers}
    # A dropout that is a call in a forward, and no layer, shows first in the layer after it.
    by_dropout = "Dropout" in kind or any(name not in layers for name in dropouts)
    if found is not None and "BatchNorm" in kind and not by_dropout:
        return Finding(
            "AR707",
            f"{name} ({kind}) is the first layer whose outputs differ, in update {case.number}",
            "each rank normalises with the mean and variance of its own samples only",
            "run.model(net, sync_batchnorm=True), or nn.SyncBatchNorm.convert_sync_batchnorm before DDP; or accept it",
            case.number,
            name,
        )
    if dropouts:
        return Finding(
            "AR706",
            f"dropout is on ({listed(dropouts)}), and what it drops differs from rank to rank; first seen in "
            f"{name or 'the loss'}, update {case.number}",
            "each rank draws masks for its own samples: as random as on one device, but not the same",
            "--no-dropout compares everything else; nothing is wrong with the training",
            case.number,
            name,
        )
    if found is not None:
        return None
    return Finding(
        "AR709",
        f"update {case.number}: all layers give the same outputs, but the loss is {case.many_loss:.6g} on "
        f"{case.world_size} ranks and {case.one_loss:.6g} on one",
        "likely the loss is a mean over something of which ranks have unequal amounts (tokens, valid targets, class weights), "
        "or compares samples with each other",
        "run.step(loss_sum, weight=number of targets); for losses between samples, run.gather(outputs) first",
        case.number,
    )


def gradient_factor(case: Case) -> Finding | None:
    """All gradients are off by one and the same factor."""
    if not case.gradients:
        return None
    factor, rest = _factor(case)
    if factor is None or rest > 2 * case.tolerance or abs(factor - 1) <= 2 * case.tolerance:
        return None
    near = Fraction(factor).limit_denominator(max(64, 2 * case.world_size))
    shown = str(near) if abs(float(near) - factor) < 1e-3 * abs(factor) else f"{factor:.4g}"
    if near == case.world_size:
        why = "gradients are added up over ranks where they should be averaged"
    elif near == Fraction(1, case.world_size):
        why = "the loss is divided by the number of ranks, and DistributedDataParallel averages once more"
    else:
        why = "the loss is divided by something that depends on the number of ranks"
    return Finding(
        "AR708",
        f"every gradient is {shown} times that of one rank, in update {case.number}",
        why,
        "the mean loss of each rank's own samples, no factor of the world size anywhere; DDP averages",
        case.number,
        case.gradients[0],
    )


def _factor(case: Case) -> tuple[float | None, float]:
    """The number that turns one rank's gradients into those of many, and what then remains of the difference."""
    pairs = [
        (a.values, b.values)
        for name, a in case.one.gradients.items()
        if (b := case.many[0].gradients.get(name)) is not None and len(a.values) == len(b.values)
    ]
    if not pairs:
        return None, 1.0
    one, many = (np.concatenate(each) for each in zip(*pairs, strict=True))
    length = float(one @ one)
    if not length or not np.isfinite(many).all():
        return None, 1.0
    factor = float(one @ many) / length
    whole = float(np.linalg.norm(many)) or 1.0
    return factor, float(np.linalg.norm(many - factor * one)) / whole


def mean_of_means(case: Case) -> Finding | None:
    """Ranks or micro-batches with unequal counts of samples, whose means count alike."""
    if not case.gradients:
        return None
    counts = [[int(loss.weight) for loss in step.losses] for step in case.many]
    if len({n for each in counts for n in each}) < 2:
        return None
    return Finding(
        "AR709",
        f"update {case.number}: micro-batches of {listed(counts)} samples (one list a rank), and the gradients are not those of "
        f"their {sum(map(sum, counts))} samples together",
        "each micro-batch's mean counts alike, whatever the number of its samples",
        "run.step(loss) weights each by its samples; by hand: loss * n * world_size / samples of the global batch",
        case.number,
        case.gradients[0],
    )


def learning_rate(case: Case) -> Finding | None:
    """Another learning rate."""
    if not case.rates_differ:
        return None
    rank, step = next(
        ((r, s) for r, s in enumerate(case.many) if s.rates != case.many[0].rates), (None, case.many[0])
    )
    one = listed(f"{rate:.6g}" for rate in case.one.rates)
    if rank is not None:
        what = f"update {case.number}: the learning rate is {listed(case.many[0].rates)} on rank 0 and {listed(step.rates)} on rank {rank}"
        why = "a scheduler is fed with a value that is not the same on all ranks, such as a rank's own loss"
        fix = "scheduler.step(run.mean(loss)), or all-reduce the value first"
    else:
        many = listed(f"{rate:.6g}" for rate in step.rates)
        what = (
            f"update {case.number}: the learning rate is {many} on {case.world_size} ranks and {one} on one"
        )
        why = "it, or the scheduler's steps, depend on the number of ranks"
        fix = "step a scheduler once per update; scale a rate with the global batch size, not with the ranks: run.scale_lr"
    return Finding("AR711", what, why, fix, case.number, rank=rank)


def local_buffer(case: Case) -> Finding | None:
    """Only buffers differ."""
    if not case.buffers or case.gradients or case.weights:
        return None
    return Finding(
        "AR713",
        f"update {case.number}: buffer{'s' * (len(case.buffers) != 1)} {listed(case.buffers)} differ, the weights do not",
        "they are computed from each rank's own batch; what the other ranks saw is not in them",
        "all-reduce what the buffer is computed from, in the forward; for batch norm run.model(net, sync_batchnorm=True)",
        case.number,
        case.buffers[0],
    )


def unknown(case: Case) -> Finding:
    """Something differs, and no cause fits."""
    kinds = {"gradients": case.gradients, "weights": case.weights, "buffers": case.buffers}
    told = "; ".join(f"{kind} of {listed(names)}" for kind, names in kinds.items() if names)
    found = case.first_layer
    told = told or (f"the outputs of {found[0].name}" if found is not None else "the loss")
    first = (case.gradients or case.weights or case.buffers or [found[0].name if found is not None else ""])[
        0
    ]
    return Finding(
        "AR700",
        f"update {case.number}: {told} differ, and no cause of the catalogue fits",
        f"the first layer whose outputs differ is {found[0].name} ({found[0].kind})"
        if found is not None
        else "",
        "--no-autocast compares in float32: half precision may part by rounding alone"
        if case.one_record.autocast
        else "run again with a batch size that the ranks divide, then with --no-dropout, to narrow it down",
        case.number,
        first,
    )


CAUSES = (
    update_skipped,
    samples,
    augmentation,
    never_synchronised,
    gradient_factor,
    forward,
    mean_of_means,
    learning_rate,
    local_buffer,
)
