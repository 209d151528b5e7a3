"""When is a job that was asked to end, and hangs, ended all the same?"""

from __future__ import annotations

import signal
from dataclasses import replace

from allranks.core.job import NodeInfo, RankExit
from allranks.run.attempt import HUNG_S, REMAINS_S, SETTLE_S, Attempt
from allranks.watch.rows import Row

HANG = {"code": "AR226", "since_s": 1.2}
REMARK = {"code": "AR727", "since_s": None}
ROWS = [Row(0, "S", marks=70, step=9, phase="backward"), Row(1, "S", marks=64, step=9, phase="python")]


def nodes(*rows: Row) -> dict[int, NodeInfo]:
    return {0: NodeInfo(0, "vm", (0, 1), {"ranks": [row.to_json() for row in rows]})}


def attempt() -> Attempt:
    return Attempt(0, [], 2, 0.0)


def codes(job: Attempt, *seen: tuple[float, list[Row]]) -> list[str]:
    """What is said at these moments."""
    return [job.hung(nodes(*rows), at) for at, rows in seen]


def test_hung_when_nothing_moves_in_a_hang_that_was_told_then_its_code_once() -> None:
    job = attempt()
    job.note(HANG, nodes(*ROWS))
    at = (100.0, 100.0 + HUNG_S - 0.1, 100.0 + HUNG_S, 100.3 + HUNG_S)
    assert codes(job, *((t, ROWS) for t in at)) == ["", "", "AR226", ""]


def test_hung_when_it_is_told_after_the_signal_then_from_there_on() -> None:
    job = attempt()
    assert codes(job, (100.0, ROWS), (100.0 + HUNG_S, ROWS)) == ["", ""]
    job.note(HANG, nodes(*ROWS))
    later = 100.1 + HUNG_S
    assert codes(job, (later, ROWS), (later + HUNG_S, ROWS)) == ["", "AR226"]


def test_hung_when_a_rank_moves_then_it_is_waited_for() -> None:
    job = attempt()
    job.note(HANG, nodes(*ROWS))
    moved = [ROWS[0], replace(ROWS[1], marks=65)]
    assert codes(job, (0.0, ROWS), (HUNG_S - 1, moved), (HUNG_S + 1, moved), (2 * HUNG_S, moved)) == [
        "",
        "",
        "",
        "AR226",
    ]


def test_hung_when_a_rank_saves_then_never() -> None:
    job = attempt()
    job.note(HANG, nodes(*ROWS))
    saving = [ROWS[0], replace(ROWS[1], phase="checkpoint")]
    assert codes(job, (0.0, saving), (HUNG_S, saving), (10 * HUNG_S, saving)) == [""] * 3


def test_hung_when_training_has_gone_on_since_then_it_is_another_wait() -> None:
    job = attempt()
    job.note(HANG, nodes(*ROWS))
    on = [replace(row, step=12) for row in ROWS]
    assert codes(job, (0.0, on), (HUNG_S, on), (10 * HUNG_S, on)) == [""] * 3


def test_hung_when_no_hang_was_told_then_never() -> None:
    job = attempt()
    job.note(REMARK, nodes(*ROWS))
    assert codes(job, (0.0, ROWS), (10 * HUNG_S, ROWS)) == [""] * 2
    job.note(HANG, nodes())  # a rank that is not seen may be saving
    assert codes(job, (0.0, []), (10 * HUNG_S, [])) == [""] * 2


def test_hung_when_ranks_wait_to_join_one_that_has_ended_then_said_without_a_verdict() -> None:
    job = attempt()
    joining = [Row(0, "S", marks=3, phase="init")]
    assert codes(job, (0.0, joining), (10 * HUNG_S, joining)) == ["", ""], "the other may yet come"
    job.exits[1] = RankExit(1, "vm", 0, 1, signal.SIGINT, 1.0, ())
    told = codes(job, (300.1, joining), (300.0 + HUNG_S, joining))
    assert told == ["", "ranks wait for others that have ended"]
    training = [replace(joining[0], phase="backward")]
    assert codes(job, (500.0, training), (500.0 + HUNG_S, training)) == ["", ""], "it may save"


def test_left_when_ranks_have_ended_then_the_others() -> None:
    job = attempt()
    ended = RankExit(0, "vm", 0, 0, None, 1.0, ())
    assert job.left() == "ranks 0, 1"
    job.exits[0] = ended
    assert job.left() == "rank 1"
    job.exits[1] = ended
    assert job.left() == ""


def _failed(
    node_rank: int, row: dict[str, object], *, is_lost: bool = False
) -> tuple[Attempt, dict[int, NodeInfo]]:
    """One of two ranks, on two nodes, has crashed at 100 s; node 0 judges."""
    job = attempt()
    job.failed_at = 100.0
    job.exits[1] = RankExit(
        rank=1, node_rank=node_rank, host="b", pid=7, code=-1, signal=11, when=0.0, last_lines=()
    )
    return job, {0: NodeInfo(0, "a", (0,), {"ranks": []}), 1: NodeInfo(1, "b", (1,), row, is_lost=is_lost)}


def test_failure_when_on_another_node_then_what_it_left_is_waited_for() -> None:
    came = {"restart": 0, "ranks": [], "ended": [{"rank": 1, "exit": {"code": -1, "signal": 11}}]}
    others = came | {"ended": [{"rank": 2, "exit": {"code": 0}}]}  # one that ended well after errors
    for row in ({"restart": 0, "ranks": []}, came | {"restart": 3}, others):  # not yet; of an attempt before
        job, known = _failed(1, row)
        moments = (100.1, 100.0 + SETTLE_S, 100.0 + REMAINS_S - 0.1, 100.1 + REMAINS_S)
        assert [job.is_heard(0, known, t) for t in moments] == [False, False, False, True]
    job, known = _failed(1, came)
    assert [job.is_heard(0, known, t) for t in (100.1, 100.1 + SETTLE_S)] == [False, True]


def test_failure_when_nothing_more_can_come_of_it_then_not_waited_for() -> None:
    soon = 100.1 + SETTLE_S
    for job, known in (_failed(0, {}), _failed(1, {}), _failed(1, {"ranks": []}, is_lost=True)):
        assert not job.is_heard(0, known, 100.1) and job.is_heard(0, known, soon)
    job, known = _failed(0, {})
    job.exits[0] = replace(job.exits[1], rank=0, signal=None, code=0)
    assert job.is_heard(0, known, 100.0)  # all have ended, and what they left is here
