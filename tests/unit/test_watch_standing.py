"""Does a hang that was told stand, or has the job moved on?"""

from __future__ import annotations

from allranks.watch.saying import Standing
from allranks.watch.verdict import Verdict

VERDICT = Verdict("AR252", "other-operation", "rank 0 is in all_reduce; rank 1 is in broadcast", (0, 1))


def test_hang_when_a_mark_is_ended_just_after_the_report_then_it_stands_since_then_and_moves_on_later_only() -> (
    None
):
    standing = Standing(VERDICT, (0, 1), ("light",), 10.0, ends_as="stop")
    assert standing.stands(("light",), 10.1) and standing.since == 10.0
    assert standing.stands(("backward",), 10.2) and standing.since == 10.2
    assert standing.stands(("backward",), 12.0)
    assert not standing.stands(("optimizer",), 12.1)
    moving = Standing(VERDICT, (0, 1), (0,), 10.0, ends_as="stop")
    assert [moving.stands((n,), 10.0 + 0.2 * n) for n in range(5)] == [True, True, True, False, False]
