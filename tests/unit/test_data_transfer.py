"""Does a batch of any nesting arrive as it was, with every tensor moved?"""

from __future__ import annotations

import collections
import dataclasses
import types
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import Dataset

from allranks.data import make_loader
from allranks.data.transfer import map_tensors, on_device, to_device

META = torch.device("meta")


class Point(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    name: str
    made: int = dataclasses.field(default=0, init=False)


class Rows(list[Any]):
    """A list of the user's own."""


class Tagged(dict[str, Any]):
    """A dict that carries something beside its items."""

    tag = ""


class Movable:
    """Moves itself."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def to(self, device: torch.device) -> Movable:
        return Movable(self.x.to(device))


def tensor() -> torch.Tensor:
    return torch.ones(2)


def test_nesting_when_moved_keeps_its_types() -> None:
    tagged = Tagged(a=tensor())
    tagged.tag = "kept"
    batch = {
        "list": [tensor(), (tensor(), "text", 1, None, b"b", 2.5)],
        "named": Point(tensor(), 3),
        "frozen": Frozen(tensor(), "n"),
        "rows": Rows([tensor()]),
        "tagged": tagged,
        "ordered": collections.OrderedDict(b=tensor()),
        "proxy": types.MappingProxyType({"c": tensor()}),
        "movable": Movable(tensor()),
        "other": object(),
    }
    moved = to_device(batch, META)
    assert moved["list"][0].device == META and moved["list"][1][0].device == META
    assert moved["list"][1][1:] == ("text", 1, None, b"b", 2.5) and type(moved["list"][1]) is tuple
    assert isinstance(moved["named"], Point) and moved["named"].x.device == META and moved["named"].y == 3
    assert isinstance(moved["frozen"], Frozen) and moved["frozen"].x.device == META
    assert (moved["frozen"].name, moved["frozen"].made) == ("n", 0)
    assert isinstance(moved["rows"], Rows) and moved["rows"][0].device == META
    assert isinstance(moved["tagged"], Tagged) and moved["tagged"].tag == "kept"
    assert moved["tagged"]["a"].device == META
    assert type(moved["ordered"]) is collections.OrderedDict and moved["ordered"]["b"].device == META
    assert moved["proxy"]["c"].device == META
    assert moved["movable"].x.device == META
    assert moved["other"] is batch["other"]
    assert batch["tagged"]["a"].device.type == "cpu" and batch["frozen"].x.device.type == "cpu"


def test_packed_sequence_when_moved_moves_itself() -> None:
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    moved = to_device([packed], torch.device("cpu"))
    assert isinstance(moved[0], PackedSequence) and torch.equal(moved[0].data, packed.data)


def test_batches_when_for_the_cpu_are_not_touched() -> None:
    pairs = iter([(1, {"x": tensor()})])
    assert on_device(pairs, torch.device("cpu")) is pairs


class Dicts(Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return {"x": torch.full((2,), float(index)), "y": Point(index, [index])}


def test_loader_when_for_another_device_gives_its_batches_there() -> None:
    loader = make_loader(Dicts(), global_batch_size=3, device="meta", num_workers=0)
    shapes = []
    for batch in loader:
        assert batch["x"].device == batch["y"].x.device == batch["y"].y[0].device == META
        assert loader.current is not None
        shapes.append((loader.current.batch, batch["x"].shape[0]))
    assert shapes == [(0, 3), (1, 1)]


@pytest.mark.parametrize("value", [1, "a", None, 2.0, b"x"])
def test_leaves_when_not_tensors_stay_as_they_are(value: Any) -> None:
    assert map_tensors(lambda t: t + 1, value) is value
