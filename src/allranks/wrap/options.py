"""Which of DDP's options fit this model on these ranks? Looked at after the first updates, and changed only where the result stays.

What the user gave stays. Buckets change where their size cannot change a bit: gradients that go through memory are added in rank order
whatever bucket they are in, what is sent at once after the last bucket is laid out by parameter, and two numbers have one order. On more
than two ranks over a group, the order in which a value is added up depends on its place in a bucket.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

LOOK_AT = 8
"""Updates after which DDP has timed some backwards, in rebuilt buckets."""
CALL_NS = 30_000  # of a bucket more: a call of the hook and its copies, tiny job, 2026-11-29
WORTH = 0.01  # of the backward
EXPOSED = 0.1  # of the backward: communication that nothing hides
MIN_BYTES = 2 << 20
_PIECES = 6
_LEFT = "left at DDP's 1 MiB for the first and 25 for the others"

Way = Literal["memory", "group", "at once", "auto", "apart"]
"""How gradients get from rank to rank: "group", bucket by bucket over the process group, as they are or in half precision; "at once",
after the last bucket (several hosts, int8, powersgd); "auto", in one of these ways or the other; "apart", not at all (sync_every)."""
_WHY_LEFT: dict[Way, str] = {
    "auto": "some ways that compress='auto' may take do not send by bucket",
    "apart": "sync_every sends weights, and no gradients",
}


@dataclass(frozen=True, slots=True)
class Given:
    """What the user said; None and False are what he left open."""

    bucket_cap_mb: float | None = None
    find_unused_parameters: bool = False
    static_graph: bool = False


@dataclass(frozen=True, slots=True)
class Seen:
    """What the first updates showed."""

    world_size: int
    way: Way
    logged: Mapping[str, Any]
    """DDP's own figures; empty where this torch has none."""
    some_unused: bool = False
    changing: tuple[str, ...] = ()
    has_buffers: bool = True


@dataclass(frozen=True, slots=True)
class Choice:
    """One option of DDP, as it is now, and why."""

    option: str
    value: Any
    reason: str
    is_changed: bool = False


def choose(given: Given, seen: Seen) -> list[Choice]:
    """Every option, with its reason; `is_changed` where the replica has to be built anew."""
    return [
        _buckets(given, seen),
        _find_unused(given, seen),
        _static_graph(given),
        Choice(
            "gradient_as_bucket_view",
            True,
            "gradients lie in the buckets: a copy of all of them less, the same values",
        ),
        _buffers(seen),
    ]


def _buckets(given: Given, seen: Seen) -> Choice:
    if given.bucket_cap_mb is not None:
        return Choice("bucket_cap_mb", given.bucket_cap_mb, "given; the first bucket has that size, too")
    sizes, backward_ns = _sizes(seen.logged), int(seen.logged.get("avg_backward_compute_time", 0))
    if seen.way in _WHY_LEFT:
        return _left(_WHY_LEFT[seen.way])
    if not sizes or backward_ns <= 0:
        return _left("it has no figures of its backwards")
    if seen.way != "group":
        return _buckets_at_once(sizes, backward_ns)
    if seen.world_size > 2:
        return _left("other buckets add values up in another order on more than two ranks")
    return _buckets_over_group(sizes, backward_ns, seen.logged)


def _left(why: str) -> Choice:
    return Choice("bucket_cap_mb", None, f"{_LEFT}: {why}")


def _buckets_at_once(sizes: list[int], backward_ns: int) -> Choice:
    spared = (len(sizes) - 1) * CALL_NS / backward_ns
    told = f"{len(sizes)} bucket{'s' * (len(sizes) != 1)} in a backward of {backward_ns / 1e6:.3g} ms"
    if spared < WORTH:
        return _left(f"{told}, one would spare {spared:.1%}")
    cap = sum(sizes) / 2**20 + 1
    reason = f"one bucket, also the first, spares {spared:.0%} of the backward; had {told}; ranks wait once in any case"
    return Choice("bucket_cap_mb", round(cap, 1), reason, is_changed=True)


def _buckets_over_group(sizes: list[int], backward_ns: int, logged: Mapping[str, Any]) -> Choice:
    communication = int(logged.get("avg_backward_comm_time", 0))
    exposed = max(0, communication - int(logged.get("avg_backward_compute_comm_overlap_time", 0)))
    told = f"{exposed / backward_ns:.0%} of the backward's time is communication that nothing hides"
    total, largest = sum(sizes), max(sizes)
    if exposed < EXPOSED * backward_ns or total < MIN_BYTES or largest < total / 2:
        return _left(f"{told}, {len(sizes)} buckets of {total >> 10} KiB")
    cap = max(0.5, total / _PIECES / 2**20)
    reason = f"{told}, and the largest of {len(sizes)} buckets holds {largest / total:.0%}: smaller ones are sent earlier"
    return Choice("bucket_cap_mb", round(cap, 2), reason, is_changed=True)


def _sizes(logged: Mapping[str, Any]) -> list[int]:
    text = logged.get("rebuilt_bucket_sizes") or logged.get("bucket_sizes") or ""
    return [int(part) for part in str(text).split(",") if part.strip().isdigit()]


def _find_unused(given: Given, seen: Seen) -> Choice:
    if not given.find_unused_parameters:
        how = "some updates leave parameters without gradient: " if seen.some_unused else ""
        return Choice(
            "find_unused_parameters",
            False,
            f"{how}what a backward left out is looked up after it, at no cost",
        )
    cost = (
        ""
        if seen.some_unused
        else f"; but no parameter was without gradient in {LOOK_AT} updates: it only costs a walk through every graph"
    )
    return Choice("find_unused_parameters", True, f"given{cost}")


def _static_graph(given: Given) -> Choice:
    if given.static_graph:
        return Choice("static_graph", True, "given")
    why = "that the graph stays cannot be seen beforehand, and without find_unused_parameters the promise spares nothing"
    return Choice("static_graph", False, why)


def _buffers(seen: Seen) -> Choice:
    if not seen.has_buffers:
        return Choice("broadcast_buffers", False, "the model has none")
    if seen.changing:
        names = ", ".join(seen.changing[:4])
        return Choice(
            "broadcast_buffers", False, f"{names}: made equal after each update, and not in each forward"
        )
    return Choice(
        "broadcast_buffers",
        False,
        "no forward reads what another changed: made equal before evaluating and saving",
    )
