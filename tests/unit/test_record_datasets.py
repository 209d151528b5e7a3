"""Is a data set known again on another rank by its attributes, without reading a sample?"""

from __future__ import annotations

import tracemalloc
from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from allranks.record import datasets


class Files(Dataset[int]):
    def __init__(self, names: list[str]) -> None:
        self.names, self.lock = names, object()

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> int:
        raise AssertionError("no sample may be read")


def test_data_set_when_described_then_equal_ones_are_equal_and_nothing_is_read() -> None:
    one, two = Files(["a", "b", "c"]), Files(["c", "b", "a"])
    first, second = datasets.describe(one), datasets.describe(two)
    assert datasets.describe(Files(["a", "b", "c"])) == first
    assert first["hash"] != second["hash"]
    assert [p[3] for p in first["parts"]] == [p[3] for p in second["parts"]]
    assert first["code"].startswith(__file__)
    assert not datasets.describe(SimpleNamespace(n=3))["is_telling"]
    assert (
        datasets.describe(TensorDataset(torch.zeros(4)))["hash"]
        != datasets.describe(TensorDataset(torch.ones(4)))["hash"]
    )


class Table:
    """As h5py and pandas have them: an array by its looks, that cannot be reshaped and reads a file when it is indexed."""

    def __init__(self, *shape: int) -> None:
        self._shape = shape

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape

    @property
    def dtype(self) -> str:
        return "float32"

    def __getitem__(self, index: object) -> object:
        raise AssertionError("nothing may be read")


class Speaking(str):
    """A text of the user's own kind."""

    def __repr__(self) -> str:
        raise AssertionError("nothing of the user's is called")


class Opening(OrderedDict[str, str]):
    """A dict that opens what is asked for."""

    def __getitem__(self, key: str) -> str:
        raise AssertionError("nothing of the user's is called")


def facts_of(**attributes: Any) -> dict[str, Any]:
    return datasets.describe(SimpleNamespace(**attributes))


@pytest.mark.parametrize("make", [lambda c: c.encode() * (32 << 20), lambda c: c * (32 << 20)])
def test_data_set_when_it_holds_large_texts_then_none_is_copied_and_they_are_told_apart(make: Any) -> None:
    one, two = make("a"), make("b")
    tracemalloc.start()
    try:
        first, other = facts_of(raw=one), facts_of(raw=two)
        many = facts_of(raw=[one] * 1000)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 << 20
    assert first["hash"] != other["hash"]
    assert many["parts"][0][1] == 1000
    assert all(len(text) <= 80 for part in many["parts"] for text in part[4])


@pytest.mark.parametrize(
    "array",
    [
        torch.arange(1 << 10).expand(1 << 30, 1 << 10),
        numpy.broadcast_to(numpy.arange(1 << 10), (1 << 30, 1 << 10)),
    ],
)
def test_array_when_not_in_one_piece_then_its_ends_are_seen_without_a_copy(array: Any) -> None:
    found = facts_of(array=array)
    assert found["is_telling"]
    assert found["hash"] != facts_of(array=array[:, ::2])["hash"]


def test_array_when_it_cannot_be_looked_at_then_its_shape_alone_and_nothing_is_concluded() -> None:
    one = facts_of(table=Table(3, 4))
    assert not one["is_telling"]
    assert one["hash"] != facts_of(table=Table(3, 5))["hash"]
    assert not facts_of(table=torch.eye(3).to_sparse())["is_telling"]


def test_attributes_when_of_the_users_own_kinds_then_nothing_of_theirs_is_called() -> None:
    found = facts_of(names=[Speaking("a"), Speaking("b")], files=Opening(a="x"), one=Speaking("c"))
    assert [part[4] for part in found["parts"]] == [["'a'", "'b'"], ["'x'"], ["'c'"]]
