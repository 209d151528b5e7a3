"""Is every global batch divided so that nothing is lost, doubled or unfair?"""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from allranks.data.shares import micro_batch_size_of, num_micro_of, parts_of, split

sizes = st.integers(1, 200)
ranks = st.integers(1, 6)
micros = st.integers(1, 40)


@settings(deadline=None)
@given(st.integers(0, 500), st.integers(1, 17))
def test_split_when_joined_gives_the_whole_in_parts_that_differ_by_one(size: int, num_parts: int) -> None:
    parts = [split(size, num_parts, i) for i in range(num_parts)]
    assert [x for start, stop in parts for x in range(start, stop)] == list(range(size))
    lengths = [stop - start for start, stop in parts]
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths, reverse=True)  # lower ranks get the extra


@settings(deadline=None)
@given(sizes, ranks, micros)
def test_parts_of_all_ranks_when_joined_are_the_global_batch(size: int, world_size: int, micro: int) -> None:
    every = [parts_of(size, rank, world_size, micro, stand_ins=True) for rank in range(world_size)]
    loaded = [x for parts in every for p in parts if p.num_samples for x in range(p.start, p.stop)]
    assert loaded == list(range(size))


@settings(deadline=None)
@given(sizes, ranks, micros)
def test_parts_in_training_have_the_same_number_on_every_rank(size: int, world_size: int, micro: int) -> None:
    num_micro = num_micro_of(size, world_size, micro)
    for rank in range(world_size):
        parts = parts_of(size, rank, world_size, micro, stand_ins=True)
        assert [p.micro for p in parts] == list(range(num_micro))
        assert all(1 <= p.stop - p.start <= micro for p in parts)
        real = [p.num_samples for p in parts]
        assert max(real) - min(real) <= 1


@settings(deadline=None)
@given(sizes, ranks, micros)
def test_stand_ins_when_a_rank_has_no_sample_are_rank_zeros_samples(
    size: int, world_size: int, micro: int
) -> None:
    of_rank_0 = parts_of(size, 0, world_size, micro, stand_ins=True)
    for rank in range(1, world_size):
        for mine, theirs in zip(
            parts_of(size, rank, world_size, micro, stand_ins=True), of_rank_0, strict=True
        ):
            if not mine.num_samples:
                assert (mine.start, mine.stop) == (theirs.start, theirs.stop)


@settings(deadline=None)
@given(sizes, ranks, micros)
def test_parts_in_evaluation_are_those_of_training_without_stand_ins(
    size: int, world_size: int, micro: int
) -> None:
    for rank in range(world_size):
        training = parts_of(size, rank, world_size, micro, stand_ins=True)
        evaluation = parts_of(size, rank, world_size, micro, stand_ins=False)
        assert evaluation == [p for p in training if p.num_samples]


@settings(deadline=None)
@given(sizes, ranks, st.integers(1, 9))
def test_micro_size_when_from_accumulation_steps_needs_no_more_steps(
    size: int, world_size: int, steps: int
) -> None:
    micro = micro_batch_size_of(size, world_size, steps)
    assert num_micro_of(size, world_size, micro) <= steps
    assert micro == 1 or num_micro_of(size, world_size, micro - 1) > steps
