"""Is it told from stacks alone who waits and who does not come, and is nothing said of ranks that go on?"""

from __future__ import annotations

from dataclasses import replace

import pytest

from allranks.watch.decide import decide
from allranks.watch.evidence import Evidence, Rank, Record, Stack
from allranks.watch.from_stacks import what_of, with_record
from allranks.watch.meeting import wait_of
from allranks.watch.verdict import Place

TORCH = "/usr/lib/python3/site-packages/torch"
C10D = f"{TORCH}/distributed/distributed_c10d.py"
ENGINE = Place(f"{TORCH}/autograd/graph.py", 10, "_engine_run_backward")
SHARED = Place("/usr/lib/python3/site-packages/allranks/comm/memory/waiting.py", 9, "_sleep")
LINE = Place("/home/ann/train.py", 30, "main", "loss.backward()")


def at(*frames: Place, number: int = 0, wchan: str = "futex_wait") -> Rank:
    stack = Stack(frames, is_main=True)
    return Rank(number, "gpu-a", pid=100 + number, state="S", wchan=wchan, stacks=(stack,))


@pytest.mark.parametrize(
    ("frames", "what"),
    [
        ((Place(C10D, 4, "barrier"), Place(C10D, 9, "wrapper"), LINE), ("collective", "barrier")),
        ((Place(C10D, 4, "all_gather"), Place(C10D, 8, "all_gather_object"), LINE), ("collective", "all_gather_object")),
        ((Place(C10D, 4, "_store_based_barrier"), Place(C10D, 5, "init_process_group"), LINE), ("init", "")),
        ((ENGINE, LINE), ("backward", "")),
        ((SHARED, ENGINE, LINE), ("backward", "")),
        ((Place("/home/ann/layers.py", 3, "backward"), ENGINE, LINE), ("python", "")),
        ((LINE,), ("python", "")),
    ],
)  # fmt: skip
def test_stack_then_tells_what_its_thread_is_in(frames: tuple[Place, ...], what: tuple[str, str]) -> None:
    assert what_of(frames) == what


@pytest.mark.parametrize(("stood_s", "code"), [(1.4, "AR226"), (0.0, None)])
def test_ranks_without_a_record_when_one_sleeps_then_named_only_if_the_other_has_not_run_meanwhile(
    stood_s: float, code: str | None
) -> None:
    sleeps = at(replace(LINE, line=12, code="time.sleep(9)"), number=1, wchan="hrtimer_nanosleep")
    ranks = with_record(at(ENGINE, LINE), stood_s), with_record(sleeps, stood_s)
    verdict = decide(Evidence(2, ranks, trigger="asked"))
    assert (verdict.code if verdict else None) == code
    if verdict is not None:
        assert verdict.ranks == (1,) and "step" not in verdict.text()


def test_gradients_through_shared_memory_when_a_rank_sleeps_in_their_exchange_then_it_waits_for_others() -> (
    None
):
    waits = replace(at(SHARED, ENGINE, LINE), record=Record(phase="backward", phase_s=3.0))
    found = wait_of(waits)
    assert found is not None and found.kind == "gradients"
    works = replace(waits, stacks=at(Place("/home/ann/layers.py", 3, "backward"), ENGINE, LINE).stacks)
    assert wait_of(works) is None
