"""Is it known which samples are in a batch, without a place of ours between the loader and its sampler?"""

from __future__ import annotations

import threading
from typing import Any
from weakref import ref

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data._utils import fetch
from torch.utils.data.dataloader import _BaseDataLoaderIter, _SingleProcessDataLoaderIter

from allranks.record import draws, notes, passes, probe_loaders, taken
from allranks.record.writer import Writer


@pytest.fixture
def marked(monkeypatch: pytest.MonkeyPatch) -> None:
    """What begins to take a loader's indices is in place."""
    monkeypatch.setattr(_BaseDataLoaderIter, "_reset", _BaseDataLoaderIter._reset)
    taken.mark_indices(_BaseDataLoaderIter)


def samples(count: int = 64) -> TensorDataset:
    return TensorDataset(torch.arange(count * 4.0).reshape(count, 4), torch.arange(count) % 4)


@pytest.mark.parametrize("workers", [0, 1])
def test_batch_when_handed_out_then_its_indices_are_known(marked: None, workers: int) -> None:
    loader = DataLoader(samples(), batch_size=4, num_workers=workers, persistent_workers=workers > 0)
    for _ in range(2):
        iterator = iter(loader)
        indices = taken.indices_of(iterator)
        for number, batch in enumerate(iterator):
            (found,) = indices.until(number + 1)
            assert found == [4 * number + i for i in range(4)] == (batch[0][:, 0] // 4).tolist()
        assert indices.until(99) == []


@pytest.mark.parametrize("workers", [0, 1])
def test_batch_when_no_more_indices_are_wanted_then_those_of_the_newest_are_known_and_few_are_kept(
    marked: None, workers: int
) -> None:
    loader = DataLoader(samples(80), batch_size=4, num_workers=workers, persistent_workers=workers > 0)
    for is_asked in (lambda number: True, lambda number: number in (3, 7, 8, 19)):
        iterator = iter(loader)
        indices = taken.indices_of(iterator)
        assert next(iterator)[1].tolist() == [0, 1, 2, 3]
        assert len(indices.until(1)) == 1
        for number, batch in enumerate(iterator, start=1):
            assert batch[0][0, 0] == 16 * number  # what the loader is given is as it was
            if is_asked(number):
                assert indices.newest(number + 1) == [4 * number + i for i in range(4)]
                assert number < 2 or indices.kept.maxlen == len(indices.kept) or number > 10
        assert indices.kept.maxlen == 1 + 2 * workers  # prefetch_factor is 2


def test_indices_when_the_pass_is_over_then_the_next_one_is_not_touched_and_the_iterator_goes() -> None:
    iterator = iter(DataLoader(samples(), batch_size=4))
    before = taken.indices_of(iterator)
    iterator._sampler_iter = follows = iter([[5, 6]])
    assert before.newest(1) is None and iterator._sampler_iter is follows
    gone = ref(iterator)
    del iterator
    assert gone() is None  # at once: its workers must not wait for the garbage collector


def test_indices_when_another_thread_begins_or_goes_on_then_they_are_not_kept(
    marked: None,
) -> None:
    begun = iter(DataLoader(samples(), batch_size=4, num_workers=0))
    begun.__dict__["_allranks_pass"] = one = probe_loaders.Pass(DataLoader(samples(), batch_size=4), 0)
    one.indices = taken.indices_of(begun)
    assert "_allranks_taken" in vars(begun)
    found: list[Any] = []

    def elsewhere() -> None:
        found.append(probe_loaders._marked_next(_SingleProcessDataLoaderIter.__next__)(begun))
        found.append("_allranks_taken" in vars(iter(DataLoader(samples(), batch_size=4))))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert found[0][1].tolist() == [0, 1, 2, 3] and found[1] is False
    assert "_allranks_taken" not in vars(begun) and one.indices.newest(1) is None


@pytest.mark.parametrize("batch_size", [4, None])
def test_pass_when_it_is_longer_than_what_is_kept_then_all_of_its_samples_are_counted(
    monkeypatch: pytest.MonkeyPatch, batch_size: int | None
) -> None:
    noted: dict[str, dict[str, Any]] = {}
    monkeypatch.setattr(notes, "_write", lambda path, kind, values: noted.update({kind: values}))
    monkeypatch.setattr(passes, "_writer", writer := Writer())
    monkeypatch.setattr(passes, "MAX_INDICES", 16)
    monkeypatch.setattr(passes, "_loaders", {})
    loader = DataLoader(samples(62), batch_size=batch_size)
    iterator = iter(loader)
    followed, indices = passes.begin(loader, "train.py:3 main", 0), taken.indices_of(iterator)
    for drawn, _ in enumerate(iterator, start=1):
        if drawn % 5 == 0:  # of quick steps some are looked at
            writer.end_step()
            followed = passes.handed(followed, indices, drawn)
    assert followed is not None and followed.size == (batch_size or 1)
    passes.handed(followed, indices, len(loader))
    passes.ended(followed)
    seen = noted["seen"]
    assert noted["pass"]["first"] == list(range(3 * (batch_size or 1)))
    assert (seen["drawn"], seen["samples"], seen["kept"], seen["distinct"]) == (len(loader), 62, 16, 16)


def test_pass_when_batches_become_smaller_after_what_is_kept_then_hardly_more_samples_are_counted_than_there_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(passes, "MAX_INDICES", 16)
    monkeypatch.setattr(passes, "_loaders", {})
    sizes = [8] * 8 + [2] * 60
    batches = [[number % 64] * size for number, size in enumerate(sizes)]
    loader = DataLoader(samples(64), batch_sampler=batches)  # type: ignore[arg-type]
    iterator = iter(loader)
    followed, indices = passes.begin(loader, "train.py:3 main", 0), taken.indices_of(iterator)
    for drawn, _ in enumerate(iterator, start=1):
        if drawn % 4 == 0:
            followed = passes.handed(followed, indices, drawn)
    assert followed is not None and sum(sizes) <= followed.samples < sum(sizes) + 4 * 8


def test_batch_when_more_were_handed_out_than_are_kept_then_the_newest_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(passes, "_loaders", {})
    monkeypatch.setattr(passes, "batch", None)
    followed, indices = passes.begin(DataLoader(samples()), "train.py:3 main", 0), taken.Taken()
    for number in range(taken.MAX_EARLY + 10):
        indices.add([number])
    passes.handed(followed, indices, taken.MAX_EARLY + 10)
    assert passes.batch == [taken.MAX_EARLY + 9]


@pytest.mark.filterwarnings("ignore:'set_vital'")
def test_batch_when_the_loader_keeps_its_samplers_state_then_indices_are_known_and_it_is_left_in_place(
    monkeypatch: pytest.MonkeyPatch,
    marked: None,
) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader.stateful_dataloader")
    kind = stateful._StatefulBaseDataLoaderIter
    monkeypatch.setattr(kind, "_next_index", kind._next_index)
    taken.mark_taking(kind)
    loader = stateful.StatefulDataLoader(samples(16), batch_size=4)
    iterator = iter(loader)
    indices = taken.indices_of(iterator)
    next(iterator)
    assert indices.newest(1) == [0, 1, 2, 3]
    next(iterator)
    assert indices.newest(2) == [4, 5, 6, 7]
    assert loader.state_dict()["_num_yielded"] == 2
    iterator._reset(loader)  # the next pass of one with persistent workers
    again = taken.indices_of(iterator)
    next(iterator)
    assert again.until(1) == [[0, 1, 2, 3]]


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
