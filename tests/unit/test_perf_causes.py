"""Does each slow cause speak where it should, with the right number, and stay silent nearby?"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from allranks.perf.breakdown import breakdown
from allranks.perf.causes import Cause, find_causes
from allranks.perf.history import read_history
from allranks.perf.values import CallTimes, History
from allranks.perf.view import View
from support.histories import Doing, write_history

REPLICA: dict[str, Any] = {
    "find_unused_parameters": False,
    "static_graph": False,
    "broadcast_buffers": True,
    "buffers": 3,
    "bucket_bytes": [1_000_000, 12_000_000, 12_000_000],
    "parameter_bytes": 25_000_000,
    "unused_bytes": 0,
    "steps": 12,
    "uncovered_forward": False,
    "autocast": False,
}


def history(tmp_path: Path, ranks: list[Doing], **more: Any) -> History:
    """What would have been read of a run in which the ranks do this."""
    return read_history(write_history(tmp_path / "run", ranks, **more))


def doing(replica: dict[str, Any] | None = None, facts: dict[str, Any] | None = None, **more: Any) -> Doing:
    """A healthy rank, but for what is named."""
    known = {"affinity": 8, "omp_threads": 4, "loader_workers": 2, "loader_line": "/x/train.py:9 main"}
    return Doing(facts=known | (facts or {}) | {"replica": REPLICA | (replica or {})}, **more)


def codes(found: History) -> list[str]:
    return [cause.code for cause in find_causes(View(found))]


def the(code: str, found: History) -> Cause:
    causes = {cause.code: cause for cause in find_causes(View(found))}
    assert code in causes, sorted(causes)
    return causes[code]


def grown(found: History, **per_step: float) -> History:
    """The history with counts of samples that grow by so much a step."""
    ranks = [
        replace(
            r, samples=tuple(replace(s, **{k: v * s.step for k, v in per_step.items()}) for s in r.samples)
        )
        for r in found.ranks
    ]
    return replace(found, ranks=tuple(ranks))


def test_healthy_ranks_then_nothing_is_said(tmp_path: Path) -> None:
    assert codes(history(tmp_path, [doing(), doing()])) == []


def test_one_healthy_process_then_nothing_is_said(tmp_path: Path) -> None:
    assert codes(history(tmp_path, [doing()])) == []


def test_short_run_then_nothing_is_said(tmp_path: Path) -> None:
    assert codes(history(tmp_path, [doing(data=40), doing(data=40)], steps=15)) == []


@pytest.mark.parametrize("wait, is_said", [(20.0, True), (2.0, False)])
def test_data_wait_then_only_a_long_one_is_said(tmp_path: Path, wait: float, is_said: bool) -> None:
    found = history(tmp_path, [doing(data=wait, worker_busy=80.0), doing(data=wait, worker_busy=80.0)])
    assert ("AR801" in codes(found)) == is_said


def test_loader_bound_then_the_number_of_workers_feeds_the_rest_of_the_step(tmp_path: Path) -> None:
    cause = the("AR801", history(tmp_path, [doing(data=20, worker_busy=80), doing(data=20, worker_busy=80)]))
    # 21 ms remain of the step, a batch takes a worker 80 ms: 3.8, and a tenth more.
    assert "num_workers=5" in cause.fix
    assert "more than the 8 cores" in cause.fix
    assert cause.costs_s == pytest.approx(0.020, rel=0.05)
    assert "train.py:9" in cause.fix


def test_loader_bound_without_workers_then_what_the_rank_reads_itself_counts(tmp_path: Path) -> None:
    facts = {"loader_workers": 0}
    cause = the("AR801", history(tmp_path, [doing(data=10, facts=facts), doing(data=10, facts=facts)]))
    assert "num_workers=1," in cause.fix


def test_loader_bound_with_enough_workers_then_more_are_not_advised(tmp_path: Path) -> None:
    facts = {"loader_workers": 6}
    rank = doing(data=20, worker_busy=40, facts=facts)
    assert "would not help" in the("AR801", history(tmp_path, [rank, rank])).fix


@pytest.mark.parametrize(
    "facts, code",
    [
        ({"loader_workers": 6}, "AR802"),
        ({"omp_threads": 8}, "AR803"),
        ({"affinity": 1}, "AR804"),
        ({}, "AR805"),
    ],
)
def test_ranks_wait_for_cores_then_the_reason_is_told_apart(
    tmp_path: Path, facts: dict[str, Any], code: str
) -> None:
    rank = doing(queue_share=0.3, facts=facts)
    found = codes(history(tmp_path, [rank, rank]))
    assert [c for c in found if c in ("AR802", "AR803", "AR804", "AR805")] == [code]


def test_threads_that_the_script_sets_itself_then_they_count_and_the_fix_is_there(tmp_path: Path) -> None:
    rank = doing({"threads": 8}, {"omp_threads": 1}, queue_share=0.3)
    found = the("AR803", history(tmp_path, [rank, rank]))
    assert "compute with 8 threads each on 8 cores" in found.title
    assert found.fix.startswith("torch.set_num_threads(4)")
    calm = doing({"threads": 1}, {"omp_threads": 8}, queue_share=0.3)  # the environment's are not used
    assert "AR803" not in codes(history(tmp_path / "calm", [calm, calm]))


def test_more_workers_than_cores_that_wait_for_nothing_then_nothing_is_said(tmp_path: Path) -> None:
    rank = doing(facts={"loader_workers": 16, "omp_threads": 16})
    assert codes(history(tmp_path, [rank, rank])) == []


def test_one_core_where_the_host_has_one_for_each_then_nothing_is_said(tmp_path: Path) -> None:
    rank = doing(facts={"affinity": 1, "omp_threads": 1, "loader_workers": 0})
    assert codes(history(tmp_path, [rank, rank], facts={"cores": 2})) == []


def test_container_limit_then_it_is_named(tmp_path: Path) -> None:
    found = history(tmp_path, [doing(), doing()])
    ranks = [
        replace(r, samples=tuple(replace(s, throttled_s=0.2 * s.t) for s in r.samples)) for r in found.ranks
    ]
    assert "container" in the("AR805", replace(found, ranks=tuple(ranks))).title


@pytest.mark.parametrize("faults, is_said", [(5, True), (0, False)])
def test_major_faults_then_said_where_they_go_on(tmp_path: Path, faults: int, is_said: bool) -> None:
    rank = doing(major_faults=faults)
    assert ("AR806" in codes(history(tmp_path, [rank, rank]))) == is_said


def test_exchange_longer_than_the_work_then_short_steps_are_named(tmp_path: Path) -> None:
    ranks = [doing(forward=2, backward=3), doing(forward=2, backward=3)]
    cause = the("AR807", history(tmp_path, ranks, exchange_ms=8.0))
    assert cause.costs_s == pytest.approx(0.008, rel=0.05)


def test_waiting_for_a_slow_rank_then_the_exchange_is_not_blamed(tmp_path: Path) -> None:
    found = history(tmp_path, [doing(), doing(python=21)])
    assert "AR807" not in codes(found)
    assert the("AR800", found).ranks == (1,)


@pytest.mark.parametrize(
    "sizes, is_said",
    [([500_000, 24_000_000], True), ([50_000] * 400, True), ([8_000_000] * 3, False), ([900_000], False)],
)
def test_buckets_then_said_where_one_has_all_or_there_are_many(
    tmp_path: Path, sizes: list[int], is_said: bool
) -> None:
    rank = doing({"bucket_bytes": sizes})
    assert ("AR808" in codes(history(tmp_path, [rank, rank], exchange_ms=6.0))) == is_said


def test_one_bucket_whose_exchange_is_hidden_then_nothing_is_said(tmp_path: Path) -> None:
    rank = doing({"bucket_bytes": [500_000, 24_000_000]})
    assert codes(history(tmp_path, [rank, rank], exchange_ms=1.0)) == []


@pytest.mark.parametrize(
    "replica, is_said",
    [
        ({"find_unused_parameters": True}, True),
        ({"find_unused_parameters": True, "unused_bytes": 64}, False),
        ({"find_unused_parameters": True, "steps": 4}, False),
    ],
)
def test_search_for_unused_then_said_only_where_there_are_none(
    tmp_path: Path, replica: dict[str, Any], is_said: bool
) -> None:
    assert ("AR809" in codes(history(tmp_path, [doing(replica), doing(replica)]))) == is_said


def test_parameters_unused_on_one_rank_then_the_search_is_needed(tmp_path: Path) -> None:
    ranks = [
        doing({"find_unused_parameters": True}),
        doing({"find_unused_parameters": True, "unused_bytes": 8}),
    ]
    assert codes(history(tmp_path, ranks)) == []


@pytest.mark.parametrize("seconds, is_said", [(0.002, True), (0.0001, False)])
def test_buffers_sent_then_said_where_it_costs(tmp_path: Path, seconds: float, is_said: bool) -> None:
    found = grown(history(tmp_path, [doing(), doing()]), buffers_s=seconds)
    assert ("AR810" in codes(found)) == is_said


def test_forward_outside_no_sync_then_it_is_said(tmp_path: Path) -> None:
    replica = {
        "uncovered_forward": True,
        "uncovered_line": "/x/train.py:31 main",
        "exchanges": 64,
        "updates": 16,
    }
    cause = the("AR811", history(tmp_path, [doing(replica), doing(replica)]))
    assert "inside no_sync (train.py:31 main)" in cause.title
    assert cause.title.endswith("exchanged 64 times in 16 steps")


@pytest.mark.parametrize("each, size, is_said", [(2.0, 8, True), (0.02, 8, False), (2.0, 1 << 24, False)])
def test_own_collectives_then_small_ones_in_every_step_are_said(
    tmp_path: Path, each: float, size: int, is_said: bool
) -> None:
    found = grown(history(tmp_path, [doing(), doing()]), calls=each)
    ranks = []
    for rank in found.ranks:
        spent = [replace(s, phases=s.phases | {"collective": 0.003 * s.step}) for s in rank.samples]
        calls = [CallTimes("all_reduce", "default", n, n, n, n + 1e-3, "t.py:5 f", size) for n in range(10)]
        ranks.append(replace(rank, samples=tuple(spent), calls=tuple(calls)))
    found = replace(found, ranks=tuple(ranks))
    assert ("AR812" in codes(found)) == is_said
    if is_said:
        assert "all_reduce of a few values at t.py:5 f" in the("AR812", found).title


def test_script_between_the_calls_on_all_ranks_then_it_is_said(tmp_path: Path) -> None:
    rank = doing(python=12)
    assert the("AR813", history(tmp_path, [rank, rank])).costs_s == pytest.approx(0.012, rel=0.05)


@pytest.mark.parametrize(
    ("late", "do"),
    [
        ({"log": 12.0}, "log once in some fifty steps"),
        ({"data": 12.0}, "look at its disk"),
        ({"forward": 18.0}, "make its work as long"),
    ],
)
def test_straggler_then_what_to_do_is_of_the_part_that_is_longer(
    tmp_path: Path, late: dict[str, float], do: str
) -> None:
    assert the("AR800", history(tmp_path, [doing(**late), doing()])).fix.startswith(do)


def test_script_between_the_calls_on_one_rank_then_that_is_a_straggler(tmp_path: Path) -> None:
    assert codes(history(tmp_path, [doing(), doing(python=12)])) == ["AR800"]


@pytest.mark.parametrize("seconds, is_said", [(0.004, True), (0.0004, False)])
def test_time_in_checkpoints_then_said_where_it_is_much(
    tmp_path: Path, seconds: float, is_said: bool
) -> None:
    found = history(tmp_path, [doing(), doing()])
    ranks = [
        replace(
            r,
            samples=tuple(replace(s, phases=s.phases | {"checkpoint": seconds * s.step}) for s in r.samples),
        )
        for r in found.ranks
    ]
    assert ("AR814" in codes(replace(found, ranks=tuple(ranks)))) == is_said


@pytest.mark.parametrize(
    "more, is_said",
    [
        ({}, True),
        ({"matmul_precision": "high"}, False),
        ({"autocast": True}, False),
        ({"capability": 70}, False),
    ],
)
def test_full_precision_on_a_gpu_then_said_unless_asked_for(
    tmp_path: Path, more: dict[str, Any], is_said: bool
) -> None:
    replica = {"dtype": "float32", "capability": 90, "matmul_precision": "highest"} | more
    assert ("AR816" in codes(history(tmp_path, [doing(replica), doing(replica)]))) == is_said


@pytest.mark.parametrize(
    "slow, part, why",
    [
        (doing(data=14, worker_busy=60), "data", "waits for its data"),
        (doing(forward=18, cpu_share=0.2), "forward", "not decided"),
        (doing(backward=24, cpu_share=1.6), "backward", "computes more"),
        (doing(forward=18, queue_share=0.5), "forward", "other processes on node0"),
        (
            doing(python=18, queue_share=0.5, cpu_share=1.8),
            "python",
            "computes more than the others, and has to wait",
        ),
        (doing(forward=18, queue_share=0.5, facts={"affinity": 1}), "forward", "bound to 1 core"),
        (doing(optimizer=14, major_faults=30), "optimizer", "swapped"),
        (doing(python=14, cpu_share=0.2), "python", "waits or sleeps"),
    ],
)
def test_straggler_then_its_part_and_reason_are_told(
    tmp_path: Path, slow: Doing, part: str, why: str
) -> None:
    from allranks.perf.straggler import find_straggler

    found = history(tmp_path, [doing(), slow, doing()])
    straggler = find_straggler(found, breakdown(found))
    assert straggler is not None
    if part == "optimizer":  # after the meeting: it comes late to the next one
        assert straggler.rank == 1
    assert (straggler.rank, straggler.part) == (1, part)
    assert why in straggler.why
