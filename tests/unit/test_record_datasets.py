"""Is a data set known again on another rank by its attributes, without reading a sample?"""

from __future__ import annotations

from types import SimpleNamespace

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
