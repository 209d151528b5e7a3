"""Is a call in which ranks differ told by the step that it was made in?"""

from __future__ import annotations

from dataclasses import replace

import pytest

from allranks.watch.decide import decide
from allranks.watch.evidence import Call, Evidence, Rank, Record
from allranks.watch.verdict import Place

LINE = Place("/home/ann/train.py", 25, "main", "dist.broadcast(mine, src=0)")


def past_the_call(rank: int, *, is_inside: bool) -> Rank:
    """The broadcast was called after step 11; the ranks are at step 59 if they have come back."""
    call = Call("broadcast", 1, "default", seq=16, shape=(2 + rank,), numel=2 + rank, dtype="float32", root=0)
    call = replace(call, where=LINE, step=11, age_s=0.6, is_inside=is_inside)
    step, phase = (11, "collective") if is_inside else (59, "python")
    record = Record(
        step=step, phase=phase, phase_s=0.1, median_step_s=0.01, group_seq=64, calls=(call,), is_probed=True
    )
    return Rank(rank, "gpu-a", pid=100 + rank, state="S", record=record)


@pytest.mark.parametrize("is_inside", [True, False])
def test_calls_that_differ_when_the_ranks_went_on_then_told_with_the_step_of_the_calls(
    is_inside: bool,
) -> None:
    ranks = past_the_call(0, is_inside=is_inside), past_the_call(1, is_inside=is_inside)
    verdict = decide(Evidence(2, ranks, trigger="mismatch", cwd="/home/ann"))
    assert verdict is not None
    assert (verdict.code, verdict.step) == ("AR253", 11)
    assert verdict.since_s in (None, 0.6)
