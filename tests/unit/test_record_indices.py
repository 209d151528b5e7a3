"""Is it known which samples are in a batch, without a place of ours between the loader and its sampler?"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data._utils import fetch
from torch.utils.data.dataloader import _BaseDataLoaderIter, _SingleProcessDataLoaderIter

from allranks.record import draws, passes, probe_loaders


def samples(count: int = 64) -> TensorDataset:
    return TensorDataset(torch.arange(count * 4.0).reshape(count, 4), torch.arange(count) % 4)


@pytest.mark.parametrize("workers", [0, 1])
def test_batch_when_handed_out_then_its_indices_are_known(
    monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    monkeypatch.setattr(_BaseDataLoaderIter, "_reset", _BaseDataLoaderIter._reset)
    passes.mark_indices(_BaseDataLoaderIter)
    loader = DataLoader(samples(), batch_size=4, num_workers=workers, persistent_workers=workers > 0)
    for _ in range(2):
        iterator = iter(loader)
        indices = passes.indices_of(iterator)
        for number, batch in enumerate(iterator):
            assert next(indices) == [4 * number + i for i in range(4)] == (batch[0][:, 0] // 4).tolist()
        assert next(indices, None) is None


def test_indices_when_another_thread_begins_or_goes_on_then_they_are_not_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_BaseDataLoaderIter, "_reset", _BaseDataLoaderIter._reset)
    passes.mark_indices(_BaseDataLoaderIter)
    begun = iter(DataLoader(samples(), batch_size=4, num_workers=0))
    begun.__dict__["_allranks_pass"] = one = probe_loaders.Pass(DataLoader(samples(), batch_size=4), 0)
    one.indices = passes.indices_of(begun)
    assert "_allranks_taken" in vars(begun)
    found: list[Any] = []

    def elsewhere() -> None:
        found.append(probe_loaders._marked_next(_SingleProcessDataLoaderIter.__next__)(begun))
        found.append("_allranks_taken" in vars(iter(DataLoader(samples(), batch_size=4))))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert found[0][1].tolist() == [0, 1, 2, 3] and found[1] is False
    assert "_allranks_taken" not in vars(begun) and next(one.indices, None) is None


@pytest.mark.filterwarnings("ignore:'set_vital'")
def test_batch_when_the_loader_keeps_its_samplers_state_then_indices_are_known_and_it_is_left_in_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader.stateful_dataloader")
    kind = stateful._StatefulBaseDataLoaderIter
    monkeypatch.setattr(kind, "_next_index", kind._next_index)
    passes.mark_taking(kind)
    loader = stateful.StatefulDataLoader(samples(16), batch_size=4)
    iterator = iter(loader)
    indices = passes.indices_of(iterator)
    next(iterator)
    assert next(indices) == [0, 1, 2, 3]
    next(iterator)
    assert next(indices) == [4, 5, 6, 7]
    assert loader.state_dict()["_num_yielded"] == 2


def test_reads_when_the_first_are_seen_then_the_mark_is_taken_off_and_workers_put_it_on_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kind = fetch._MapDatasetFetcher
    plain = kind.fetch
    for one in (kind, fetch._IterableDatasetFetcher):
        monkeypatch.setattr(one, "fetch", one.fetch)
    monkeypatch.setattr(probe_loaders, "_FETCHING", [])
    monkeypatch.setattr(draws, "_left", draws.LOOKS)
    probe_loaders.mark_fetching(fetch)
    marked = kind.fetch
    assert marked is not plain
    assert len(list(DataLoader(samples(), batch_size=8))) == 8
    assert kind.fetch is plain
    for put in probe_loaders._FETCHING:
        put()
    assert kind.fetch is marked
