"""Are DDP's options chosen for the reasons that they give, and left where the user chose or the result could change?"""

from __future__ import annotations

from typing import Any

import pytest

from allranks.wrap.options import Choice, Given, Seen, Way, choose

# What torch 2.13.0 says of four Linear(512, 512) on two ranks over gloo.
GLOO = {
    "rebuilt_bucket_sizes": "1050624, 3151872",
    "bucket_sizes": "4202496",
    "avg_backward_comm_time": 55_551_171,
    "avg_backward_compute_comm_overlap_time": 22_044_455,
    "avg_backward_compute_time": 34_012_699,
}


def buckets(way: Way = "group", world_size: int = 2, given: Given | None = None, **figures: Any) -> Choice:
    found = choose(given or Given(), Seen(world_size, way, {**GLOO, **figures}))
    return next(c for c in found if c.option == "bucket_cap_mb")


def test_buckets_when_communication_is_not_hidden_on_two_ranks_then_smaller_ones() -> None:
    choice = buckets()
    assert choice.is_changed and choice.value == pytest.approx(4202496 / 6 / 2**20, abs=0.01)
    assert "99%" in choice.reason and "75%" in choice.reason


def test_buckets_when_order_of_sums_could_change_then_left() -> None:
    choice = buckets(world_size=3)
    assert not choice.is_changed and "another order" in choice.reason


@pytest.mark.parametrize(
    "figures",
    [
        {"avg_backward_compute_comm_overlap_time": 54_000_000},
        {"rebuilt_bucket_sizes": "1050624, 1050624, 1050624"},
        {"rebuilt_bucket_sizes": "300000"},
    ],
)
def test_buckets_when_smaller_ones_would_hide_no_more_then_left(figures: dict[str, Any]) -> None:
    assert not buckets(**figures).is_changed


def test_buckets_when_through_memory_and_backward_is_short_then_one() -> None:
    short = buckets("memory", 4, avg_backward_compute_time=1_000_000)
    assert short.is_changed and short.value > 4202496 / 2**20 and "3%" in short.reason
    assert not buckets("memory", 4).is_changed
    assert not buckets("memory", 4, rebuilt_bucket_sizes="1000", avg_backward_compute_time=1000).is_changed


def test_buckets_when_all_is_sent_at_once_and_backward_is_short_then_one() -> None:
    short = buckets("at once", 3, avg_backward_compute_time=1_000_000)
    assert short.is_changed and "one bucket" in short.reason


def test_buckets_when_given_or_unknown_or_not_sent_then_left_and_why() -> None:
    given = buckets(given=Given(bucket_cap_mb=3.0))
    assert (given.value, given.is_changed) == (3.0, False) and "given" in given.reason
    left: tuple[tuple[Way, str], ...] = (("auto", "compress='auto'"), ("apart", "no gradients"))
    for way, why in left:
        choice = buckets(way)
        assert not choice.is_changed and why in choice.reason
    unknown = choose(Given(), Seen(2, "memory", {}))[0]
    assert not unknown.is_changed and "no figures" in unknown.reason


def test_other_options_when_given_then_kept_and_their_cost_told() -> None:
    found = {c.option: c for c in choose(Given(None, True, True), Seen(2, "group", GLOO))}
    assert (
        found["find_unused_parameters"].value is True
        and "only costs" in found["find_unused_parameters"].reason
    )
    assert found["static_graph"].value is True
    open_ = {c.option: c for c in choose(Given(), Seen(2, "group", GLOO, True, ("vq.codebook",)))}
    assert open_["find_unused_parameters"].value is False and open_["static_graph"].value is False
    assert "vq.codebook" in open_["broadcast_buffers"].reason
    none = {c.option: c for c in choose(Given(), Seen(2, "group", GLOO, has_buffers=False))}
    assert none["broadcast_buffers"].reason == "the model has none"
    assert not any(c.is_changed for name, c in open_.items() if name != "bucket_cap_mb")
