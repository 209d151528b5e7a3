"""What did the ranks of one run do, update by update? The recording that a rank writes and the comparison reads.

A recording is a folder with, for each rank, `rank0.jsonl` (one line per event) and `rank0.values` (float64 numbers that the lines point
into): a fingerprint of every tensor, its sum and sum of squares and up to MAX_VALUES of its entries.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

MAX_VALUES = 1024
"""Entries of a tensor that are kept; all of a smaller one, evenly spaced ones of a larger one."""


@dataclass(frozen=True, slots=True)
class Print:
    """The fingerprint of one tensor."""

    name: str
    numel: int
    dtype: str
    sum: float
    squares: float
    """The sum of squares."""
    values: np.ndarray

    @property
    def norm(self) -> float:
        return self.squares**0.5

    def distance(self, other: Print) -> float:
        """The Euclidean distance of the two tensors, from the entries that are kept, scaled to all."""
        kept = len(self.values)
        if kept != len(other.values) or self.numel != other.numel:
            return float("inf")
        # Only finite numbers have a distance; a NaN on both sides is the same.
        same = (self.values == other.values) | (np.isnan(self.values) & np.isnan(other.values))
        if same.all():
            hidden = abs(self.sum - other.sum) if self.numel > kept else 0.0
            return hidden / self.numel**0.5 if hidden == hidden else float("inf")
        gap = np.where(same, 0.0, self.values - other.values)
        scale = (self.numel / kept) ** 0.5
        return float(np.linalg.norm(gap)) * scale if np.isfinite(gap).all() else float("inf")


@dataclass(frozen=True, slots=True)
class Batch:
    """What a loader handed out: the samples' indices where there are any, and a hash of each sample's content."""

    loader: int
    count: int
    indices: tuple[Any, ...] | None
    hashes: tuple[int, ...] | None
    shape: str

    @property
    def ids(self) -> tuple[Any, ...]:
        """What tells the samples apart: their indices, else their contents."""
        if self.indices is not None:
            return self.indices
        return self.hashes if self.hashes is not None else ("?",) * self.count


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss that went into backward: a mean over `weight` samples, or (is_sum) a sum over `weight`."""

    value: float
    weight: float
    is_sum: bool


@dataclass(frozen=True, slots=True)
class Layer:
    """All outputs of one layer in an update, added up."""

    name: str
    kind: str
    count: int
    sum: float
    squares: float
    absolute: float
    """The sum without signs: batch norm leaves sum and sum of squares as they are, whatever it normalises with."""


@dataclass(frozen=True, slots=True)
class Step:
    """One update on one rank."""

    number: int
    optimizer: int
    rates: tuple[float, ...]
    batches: tuple[Batch, ...]
    losses: tuple[Loss, ...]
    layers: tuple[Layer, ...]
    dropouts: Mapping[str, int]
    """Calls of dropout that dropped something, by the layer they were made in."""
    gradients: Mapping[str, Print]
    weights: Mapping[str, Print]
    buffers: Mapping[str, Print]


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass over a loader that trained nothing: an evaluation."""

    loader: int
    ids: tuple[Any, ...]
    after: int
    """Updates before it."""


@dataclass(slots=True)
class RankRecord:
    """All of one rank."""

    rank: int
    world_size: int
    steps: list[Step] = field(default_factory=list)
    passes: list[Pass] = field(default_factory=list)
    initial: dict[str, Print] = field(default_factory=dict)
    loaders: list[dict[str, Any]] = field(default_factory=list)
    """Of each DataLoader: batch_size, is_distributed, where (file:line), scaled_by."""
    autocast: str = ""
    uses_library: bool = False
    end: str = ""
    """Why the recording ended: "updates" (enough of them), "script"; "" if the process was cut off."""


@dataclass(slots=True)
class Recording:
    """One run."""

    ranks: list[RankRecord]

    @property
    def world_size(self) -> int:
        return len(self.ranks)

    @property
    def num_updates(self) -> int:
        """Updates that all ranks have made."""
        return min((len(rank.steps) for rank in self.ranks), default=0)


def read(folder: Path) -> Recording:
    """The recording in a folder; a rank whose last line was cut off loses that line."""
    paths = sorted(folder.glob("rank*.jsonl"), key=lambda path: int(path.stem.removeprefix("rank")))
    return Recording([_read_rank(path) for path in paths])


def _read_rank(path: Path) -> RankRecord:
    values = np.fromfile(path.with_suffix(".values"), dtype=np.float64)
    record = RankRecord(int(path.stem.removeprefix("rank")), 0)
    for line in _lines(path):
        event = line["event"]
        if event == "start":
            record.world_size = line["world_size"]
        elif event == "model":
            record.initial.update(_prints(line["weights"], values))
        elif event == "loader":
            record.loaders.append(
                {key: line[key] for key in ("batch_size", "is_distributed", "where", "scaled_by")}
            )
        elif event == "step":
            record.steps.append(_step(line, values))
            record.autocast = record.autocast or line["autocast"]
            record.uses_library = record.uses_library or line["uses_library"]
        elif event == "pass":
            record.passes.append(Pass(line["loader"], tuple(map(_hashable, line["ids"])), line["after"]))
        elif event == "end":
            record.end = line["reason"]
    return record


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            yield json.loads(text)
        except json.JSONDecodeError:
            return


def _step(line: Mapping[str, Any], values: np.ndarray) -> Step:
    return Step(
        number=line["number"],
        optimizer=line["optimizer"],
        rates=tuple(line["rates"]),
        batches=tuple(_batch(row) for row in line["batches"]),
        losses=tuple(Loss(*row) for row in line["losses"]),
        layers=tuple(Layer(*row) for row in line["layers"]),
        dropouts=line["dropouts"],
        gradients=_prints(line["gradients"], values),
        weights=_prints(line["weights"], values),
        buffers=_prints(line["buffers"], values),
    )


def _batch(row: Sequence[Any]) -> Batch:
    loader, count, indices, hashes, shape = row
    return Batch(
        loader,
        count,
        None if indices is None else tuple(map(_hashable, indices)),
        None if hashes is None else tuple(hashes),
        shape,
    )


def _hashable(value: Any) -> Any:
    return tuple(map(_hashable, value)) if isinstance(value, list) else value


def _prints(rows: Sequence[Sequence[Any]], values: np.ndarray) -> dict[str, Print]:
    return {
        name: Print(name, numel, dtype, float(total), float(squares), values[start : start + kept])
        for name, numel, dtype, total, squares, start, kept in rows
    }
