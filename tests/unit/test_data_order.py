"""Is the sequence of global batches that of one device, on any number of ranks, from any point on?"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import SubsetRandomSampler, TensorDataset

from allranks.core.errors import CheckpointError, UsageError
from allranks.data import MicroBatch, RankLoader, make_loader
from support.sequences import Seen, global_batches, jobs, ranks_of, see, tensors

pytestmark = pytest.mark.filterwarnings("ignore:AR134")


@settings(deadline=None)
@given(jobs, st.booleans())
def test_training_on_any_number_of_ranks_when_joined_is_the_sequence_of_one_rank(
    job: dict[str, Any], shuffle: bool
) -> None:
    every = [see(each, epochs=2) for each in ranks_of(job, shuffle=shuffle, train=True)]
    alone = [see(each, epochs=2) for each in ranks_of(job, 1, shuffle=shuffle, train=True)]
    assert global_batches(every) == global_batches(alone)
    for epoch in (0, 1):
        of_epoch = [i for (e, _), indices in global_batches(every).items() if e == epoch for i in indices]
        assert sorted(of_epoch) == list(range(job["length"]))


@settings(deadline=None)
@given(jobs)
def test_training_when_ranks_are_compared_has_equal_counts_and_fair_shares(job: dict[str, Any]) -> None:
    loaders = ranks_of(job, shuffle=True)
    every = [see(each) for each in loaders]
    assert {len(seen) for seen in every} == {len(each) for each in loaders}
    for marks in zip(*every, strict=True):
        assert len({(m.batch, m.micro, m.is_last, m.global_samples) for m in marks}) == 1
        assert all(m.loaded for m in marks)
    shares: dict[int, list[int]] = {}
    for rank, seen in enumerate(every):
        for each in seen:
            shares.setdefault(each.batch, [0] * len(every))[rank] += len(each.indices)
    for of_ranks in shares.values():
        assert max(of_ranks) - min(of_ranks) <= 1


@settings(deadline=None)
@given(jobs)
def test_training_when_drop_last_leaves_out_only_the_last_partial_batch(job: dict[str, Any]) -> None:
    if job["length"] < job["batch"]:
        return
    every = global_batches([see(each) for each in ranks_of(job, shuffle=True, drop_last=True)])
    whole = global_batches([see(each) for each in ranks_of(job, shuffle=True)])
    assert every == {key: value for key, value in whole.items() if len(value) == job["batch"]}


@settings(deadline=None)
@given(jobs)
def test_evaluation_on_any_number_of_ranks_gives_each_sample_once(job: dict[str, Any]) -> None:
    loaders = ranks_of(job)
    every = [see(each) for each in loaders]
    assert [len(seen) for seen in every] == [len(each) for each in loaders]
    assert not any(each.is_training for each in loaders)
    loaded = sorted(i for seen in every for each in seen for i in each.loaded)
    assert loaded == list(range(job["length"]))


@settings(deadline=None)
@given(jobs, st.data())
def test_resume_when_at_any_point_goes_on_as_if_never_stopped(
    job: dict[str, Any], data: st.DataObject
) -> None:
    whole = see(ranks_of(job, shuffle=True)[-1], epochs=2)
    stop = data.draw(st.integers(0, len(whole)))
    first, second = ranks_of(job, shuffle=True)[-1], ranks_of(job, shuffle=True)[-1]
    before = see(first, epochs=2, until=stop) if stop else []
    assert before == whole[:stop]
    second.load_state_dict(first.state_dict())
    after: list[Seen] = []
    while len(after) < len(whole) - stop:
        after += see(second, until=len(whole) - stop - len(after))
    assert after == whole[stop:]


@settings(deadline=None)
@given(jobs, st.integers(1, 4), st.data())
def test_resume_when_on_another_number_of_ranks_continues_the_global_sequence(
    job: dict[str, Any], other: int, data: st.DataObject
) -> None:
    alone = global_batches([see(each) for each in ranks_of(job, 1, shuffle=True)])
    stop = data.draw(st.integers(0, len(alone)))
    states, before = [], []
    for each in ranks_of(job, shuffle=True):
        seen: list[Seen] = []
        for _ in each:
            mark = each.current
            assert mark is not None
            if mark.batch < stop:
                seen.append(Seen(0, mark.batch, mark.micro, mark.indices or [], [], False, 0))
            if mark.batch == stop - 1 and mark.is_last:
                states.append(each.state_dict())
                break
        before.append(seen)
    after = []
    for each in ranks_of(job, other, shuffle=True):
        if stop:
            each.load_state_dict(states[0])
        after.append(see(each))
    assert global_batches(before) | global_batches(after) == alone


def test_resume_when_inside_a_window_on_other_ranks_begins_the_window_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    job = {"length": 16, "batch": 8, "world_size": 2, "division": {"micro_batch_size": 2}}
    one = ranks_of(job, shuffle=True)[0]
    see(one, until=3)
    assert one.state_dict()["batch"] == 1 and one.state_dict()["micro"] == 1
    every = ranks_of(job, 1, shuffle=True)
    every[0].load_state_dict(one.state_dict())
    assert [each.batch for each in see(every[0])] == [1, 1, 1, 1]
    assert "start of global batch 1" in caplog.text


def test_state_when_of_another_data_set_is_refused() -> None:
    one = make_loader(tensors(20), global_batch_size=4, shuffle=True)
    other = make_loader(tensors(21), global_batch_size=4, shuffle=True)
    with pytest.raises(CheckpointError, match=r"AR141 .* 20 samples, the data set has 21"):
        other.load_state_dict(one.state_dict())


def test_state_when_of_another_batch_size_goes_on_at_the_same_sample_or_is_refused() -> None:
    one = make_loader(tensors(24), global_batch_size=4, shuffle=True)
    seen = see(one, until=3)
    fitting = make_loader(tensors(24), global_batch_size=6, shuffle=True)
    fitting.load_state_dict(one.state_dict())
    rest = [i for each in see(fitting) for i in each.indices]
    assert sorted(rest + [i for each in seen for i in each.indices]) == list(range(24))
    unfit = make_loader(tensors(24), global_batch_size=5, shuffle=True)
    with pytest.raises(CheckpointError, match="global_batch_size=4 after 3 batches, now it is 5"):
        unfit.load_state_dict(one.state_dict())


def test_state_when_of_another_seed_goes_on_with_the_saved_seed() -> None:
    one = make_loader(tensors(24), global_batch_size=4, shuffle=True, seed=1)
    whole = see(make_loader(tensors(24), global_batch_size=4, shuffle=True, seed=1))
    see(one, until=2)
    other = make_loader(tensors(24), global_batch_size=4, shuffle=True, seed=2)
    other.load_state_dict(one.state_dict())
    assert see(other) == whole[2:]


def test_state_when_at_the_end_of_an_epoch_gives_no_more_batches_of_it() -> None:
    one = make_loader(tensors(8), global_batch_size=4, shuffle=True, epoch_of=lambda: 5)
    see(one)
    again = make_loader(tensors(8), global_batch_size=4, shuffle=True, epoch_of=lambda: 5)
    again.load_state_dict(one.state_dict())
    assert see(again) == []


def test_state_when_the_run_is_in_another_epoch_begins_at_its_start() -> None:
    one = make_loader(tensors(8), global_batch_size=2, shuffle=True, epoch_of=lambda: 5)
    see(one, until=2)
    again = make_loader(tensors(8), global_batch_size=2, shuffle=True, epoch_of=lambda: 6)
    again.load_state_dict(one.state_dict())
    assert [each.batch for each in see(again)] == [0, 1, 2, 3]


def test_epoch_when_nobody_sets_it_goes_up_by_itself() -> None:
    loader = make_loader(tensors(50), global_batch_size=50, shuffle=True)
    first, second = see(loader), see(loader)
    assert (first[0].epoch, second[0].epoch) == (0, 1)
    assert first[0].indices != second[0].indices
    loader.set_epoch(0)
    assert see(loader) == first


def test_epoch_when_the_run_has_one_gives_a_new_order_to_a_second_pass() -> None:
    epoch = 3
    loader = make_loader(tensors(50), global_batch_size=50, shuffle=True, epoch_of=lambda: epoch)
    first, second = see(loader), see(loader)
    assert first[0].indices != second[0].indices
    epoch = 4
    third = see(loader)
    assert third[0].indices not in (first[0].indices, second[0].indices)
    with pytest.raises(UsageError, match=r"AR147 set_epoch\(1\)"):
        loader.set_epoch(1)


def test_callbacks_when_the_loop_breaks_are_told_of_batches_and_the_end() -> None:
    told: list[Any] = []

    def on_batch(mark: MicroBatch) -> None:
        told.append(mark.batch)

    loader = make_loader(
        tensors(8), global_batch_size=2, on_batch=on_batch, on_end=lambda: told.append("end")
    )
    for _ in loader:
        assert loader.current is not None
        if loader.current.batch == 1:
            break
    assert told == [0, 1, "end"]
    assert loader.current is None
    told.clear()
    assert len(see(loader)) == 4
    assert told == [0, 1, 2, 3, "end"]


def test_an_older_iteration_when_a_newer_one_began_is_refused() -> None:
    loader = make_loader(tensors(8), global_batch_size=2)
    older, newer = iter(loader), iter(loader)
    next(older)
    next(newer)
    with pytest.raises(UsageError, match="AR143"):
        next(older)
    next(newer)


def test_a_look_at_the_first_batch_then_changes_no_later_iteration() -> None:
    def loader(**more: Any) -> RankLoader:
        return make_loader(tensors(20), global_batch_size=4, shuffle=True, **more)

    for more in ({}, {"epoch_of": lambda: 2}):
        plain, looked = loader(**more), loader(**more)
        for _ in range(2):
            next(iter(looked))
        assert see(looked, epochs=2) == see(plain, epochs=2)


def test_a_look_at_the_first_batch_when_resumed_leaves_the_position() -> None:
    one = make_loader(tensors(20), global_batch_size=4, shuffle=True)
    whole = see(make_loader(tensors(20), global_batch_size=4, shuffle=True))
    see(one, until=2)
    two = make_loader(tensors(20), global_batch_size=4, shuffle=True)
    state = one.state_dict()
    two.load_state_dict(state)
    assert two.state_dict() == state
    assert next(iter(two))[0].tolist() == whole[2].loaded
    assert see(two) == whole[2:]


@pytest.mark.parametrize(("num", "sampler", "times"), [(20, False, 3), (20, True, 130), (5000, False, 5)])
def test_epochs_when_short_and_from_a_seed_then_compared_now_and_then(
    num: int, sampler: bool, times: int
) -> None:
    asked = []

    def exchange(value: int) -> Any:
        asked.append(value)
        return lambda: [value, value]

    data = TensorDataset(torch.arange(num))
    how: dict[str, Any] = {"sampler": SubsetRandomSampler(range(num))} if sampler else {"shuffle": True}
    loader = make_loader(data, world_size=2, global_batch_size=10, exchange=exchange, **how)
    for _ in range(130 if num == 20 else 5):  # of 2 batches; of 500
        assert len(list(loader)) == num // 10
    assert len(asked) == times
