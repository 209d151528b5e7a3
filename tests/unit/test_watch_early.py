"""Is what can be known early told early, and is what only looks like it left alone?"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from allranks.watch import apart, file_locks, proc
from allranks.watch.case import Case, has_left
from allranks.watch.decide import decide
from allranks.watch.evidence import Call, Evidence, Exit, Failure, Model, Rank, Record, Stack
from allranks.watch.rows import Row
from allranks.watch.saying import AT_WORK_S, SECOND_LOOK_S, Standing
from allranks.watch.stood import Stood
from allranks.watch.trigger import Trigger
from allranks.watch.verdict import Place, Verdict

HERE = Place("/home/ann/train.py", 30, "main", "model = DDP(model)")
WIDE = ("0.weight float32 [17, 16] trained", "0.bias float32 [17] trained")
NARROW = ("0.weight float32 [16, 16] trained", "0.bias float32 [16] trained")


def build(rank: int, **more: Any) -> Row:
    """A rank that constructs its first DDP, having issued three collectives."""
    base: dict[str, Any] = {
        "state": "R",
        "phase": "build",
        "phase_s": 0.4,
        "tick_s": 0.05,
        "seq": 3,
        "model": (1, 7),
    }
    return Row(rank, **(base | more))


def call(rank: int, **more: Any) -> Row:
    """A rank in its fourth collective, with no model yet."""
    base: dict[str, Any] = {
        "state": "S",
        "phase": "collective",
        "op": "all_gather_object",
        "call_seq": 3,
        "call_s": 0.4,
    }
    return Row(rank, **(base | more))


def kinds_of(*rows: Row) -> set[object]:
    return {sign[0] for sign in apart.signs({r.rank: r for r in rows})}


def test_models_when_two_differ_in_construction_then_seen_at_once() -> None:
    assert kinds_of(build(0, phase_s=0.05), build(1, phase_s=0.0, model=(1, 8))) == {"models"}


@pytest.mark.parametrize(
    "other",
    [
        build(1, model=(1, 7)),
        build(1, model=(2, 8)),  # its second: the first has not been left by all
        build(1, model=(1, 8), num_groups=2),  # each group has a model of its own
        build(1, model=(1, 8), phase="python"),  # long built
    ],
    ids=["the same", "of another number", "in groups", "not in construction"],
)
def test_models_when_they_need_not_be_the_same_then_nothing_is_seen(other: Row) -> None:
    assert kinds_of(build(0), other) == set()


def test_call_when_another_rank_constructs_ddp_in_its_place_then_seen() -> None:
    assert kinds_of(call(0), build(1)) == {"build"}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (call(0, call_s=0.1), build(1)),
        (call(0), build(1, tick_s=0.9)),  # its count is old
        (call(0), build(1, seq=4)),  # it has made that call, which the other leaves in a moment
        (call(0), build(1, seq=-1)),
        (call(0, model=(1, 7)), build(1)),  # init_sync=False: whoever has built it already did not wait
        (call(0, members="0,2", num_groups=1), build(1)),
        (call(0, op="new_group"), build(1)),
    ],
    ids=["just entered", "stale", "past it", "unknown", "no collective in it", "another group", "new_group"],
)
def test_call_when_it_may_still_be_met_then_nothing_is_seen(one: Row, other: Row) -> None:
    assert kinds_of(one, other) == set()


def test_names_when_ranks_disagree_in_init_then_seen_and_not_while_one_has_just_come() -> None:
    rows = [Row(n, phase="init", phase_s=0.4, said=(n, 2 + 2 * n)) for n in range(2)]
    assert kinds_of(*rows) == {"names"}
    assert kinds_of(rows[0], replace(rows[1], phase_s=0.1)) == set()
    assert kinds_of(*(replace(r, said=(r.rank, 2)) for r in rows)) == set()


def test_trigger_when_signs_stay_then_one_look() -> None:
    trigger, rows = Trigger(), {0: call(0), 1: build(1)}
    found = [trigger.look(rows, now) for now in (1.0, 1.1)]
    assert [f.kind if f else "" for f in found] == ["mismatch", ""]


def test_trigger_when_a_wait_goes_on_then_a_second_look_soon_after_the_first() -> None:
    trigger, looks = Trigger(), []
    for tenth in range(10, 40):
        age = tenth / 10
        rows = {0: Row(0, "S", phase="backward", phase_s=age), 1: Row(1, "R", phase="python", phase_s=age)}
        if trigger.look(rows, age) is not None:
            looks.append(age)
    assert looks == [1.1, 1.6, 2.7]


def test_trigger_when_all_sleep_then_one_early_look_and_not_at_every_step() -> None:
    trigger, looks = Trigger(), []
    for tenth in range(300):  # a pause of 2 s in each step, on all ranks
        now, step = tenth / 10, tenth // 20
        rows = {
            n: Row(n, "S", phase="python", marks=step, step=step, is_asleep=tenth % 20 > 10) for n in (0, 1)
        }
        if trigger.look(rows, now) is not None:
            looks.append(now)
    assert len(looks) == 2 and looks[1] - looks[0] >= 20.0


def test_trigger_when_one_rank_only_sleeps_then_no_early_look() -> None:
    trigger = Trigger()
    rows = {0: Row(0, "S", phase="python", is_asleep=True), 1: Row(1, "R", phase="python")}
    assert not any(trigger.look(rows, now) for now in (0.0, 2.0, 9.0))


# --- what is said ---


def in_build(rank: int, parameters: tuple[str, ...], **record: Any) -> Rank:
    known: dict[str, Any] = {
        "phase": "build",
        "phase_s": 0.4,
        "group_seq": 3,
        "where": HERE,
        "model": Model(1, len(parameters), hash(parameters), parameters),
    }
    return Rank(
        rank, "gpu-a", pid=100 + rank, state="R", main_cpu_share=0.9, record=Record(**(known | record))
    )


def verdict_on(*ranks: Rank, trigger: str = "mismatch") -> Verdict | None:
    return decide(Evidence(world_size=len(ranks), ranks=ranks, trigger=trigger))


def test_models_when_their_trained_sizes_differ_then_said_before_torch_compares_them() -> None:
    verdict = verdict_on(in_build(0, NARROW), in_build(1, WIDE))
    assert verdict is not None and verdict.code == "AR280"
    assert "[17, 16]" in verdict.head()


def test_models_when_only_names_or_frozen_sizes_differ_then_nothing_is_said() -> None:
    renamed = tuple(p.replace("0.", "layer.") for p in NARROW)
    frozen = (*NARROW, "table float32 [9, 9] frozen")
    assert verdict_on(in_build(0, NARROW), in_build(1, renamed)) is None
    assert verdict_on(in_build(0, NARROW), in_build(1, frozen)) is None


def test_construction_when_another_rank_is_in_a_call_in_its_place_then_said_while_it_still_imports() -> None:
    gather = Call("all_gather_object", seq=3, where=replace(HERE, line=29), age_s=0.4, is_inside=True)
    waiting = Rank(0, "gpu-a", pid=100, state="S", record=Record(phase="collective", calls=(gather,)))
    verdict = verdict_on(waiting, in_build(1, NARROW))
    assert verdict is not None and verdict.code == "AR286"
    assert verdict_on(waiting, in_build(1, NARROW, group_seq=4)) is None
    assert verdict_on(waiting, in_build(1, NARROW, num_groups=1)) is None


def lost_its_peer() -> Rank:
    words = Failure("RuntimeError", "Connection closed by peer [127.0.0.1]:4711", (HERE,))
    call = Call("barrier", seq=1, where=HERE, has_failed=True)
    record = Record(phase="exit", exit_kind="exception", calls=(call,))
    return Rank(0, "gpu-a", pid=100, state="S", record=record, failure=words)


def left(**more: Any) -> Rank:
    known: dict[str, Any] = {"phase": "python", "phase_s": 0.4, "is_destroyed": True, "where": HERE}
    stack = Stack((replace(HERE, code="time.sleep(60)"),), is_main=True)
    return Rank(1, "gpu-a", pid=101, state="S", record=Record(**(known | more)), stacks=(stack,))


def test_group_destroyed_when_that_rank_goes_on_elsewhere_then_its_peer_need_not_end_first() -> None:
    evidence = Evidence(world_size=2, ranks=(lost_its_peer(), left()), trigger="dying")
    assert not Case(evidence).is_end_to_come
    verdict = decide(evidence)
    assert verdict is not None and (verdict.code, verdict.ranks) == ("AR262", (1,))


def test_group_destroyed_when_that_rank_may_be_on_its_way_out_then_its_end_is_waited_for() -> None:
    on_the_way = [
        left(phase_s=0.1),
        left(phase="exit"),
        replace(left(), state="R"),
        replace(left(), stacks=()),
        replace(left(), is_cleaning_up=True),  # finally: destroy_process_group(), with an error behind it
        left(exit_kind="exception"),
    ]
    assert not any(has_left(r) for r in on_the_way)
    for rank in (on_the_way[4], replace(on_the_way[4], record=replace(left().record, phase_s=0.06))):  # type: ignore[type-var]
        waiting = Rank(0, "gpu-a", pid=100, state="S", record=Record(phase="backward", phase_s=0.06))
        assert decide(Evidence(world_size=2, ranks=(waiting, rank), trigger="waiting")) is None
    evidence = Evidence(world_size=2, ranks=(lost_its_peer(), on_the_way[0]), trigger="dying")
    assert Case(evidence).is_end_to_come
    gone = replace(left(), exit=Exit(0, None, 1.0), state="")
    assert not Case(Evidence(world_size=2, ranks=(lost_its_peer(), gone), trigger="dying")).is_end_to_come


def test_victim_when_it_is_met_at_a_look_for_another_reason_then_its_peers_end_is_waited_for_all_the_same() -> (
    None
):
    ranks = (lost_its_peer(), left(phase_s=0.1))
    assert Case(Evidence(world_size=2, ranks=ranks, trigger="silence")).is_end_to_come
    assert not Case(Evidence(world_size=2, ranks=ranks, trigger="exit")).is_end_to_come
    record = ranks[0].record
    assert record is not None
    kept = (
        replace(ranks[0], record=replace(record, phase_s=9.0)),
        ranks[1],
    )  # something keeps it from ending
    assert not Case(Evidence(world_size=2, ranks=kept, trigger="waiting")).is_end_to_come


def busy(line: int = 30, **more: Any) -> Rank:
    """Rank 1 computes at a line."""
    record = Record(step=30, phase="python", phase_s=1.6, median_step_s=0.01)
    stack = Stack((replace(HERE, line=line, code="while True: pass"),), is_main=True)
    return replace(
        Rank(1, "gpu-a", pid=101, state="R", main_cpu_share=0.9, record=record, stacks=(stack,)), **more
    )


def test_stood_when_two_looks_find_the_same_lines_then_since_the_first() -> None:
    stood = Stood()
    assert [stood.mark([busy()], now)[0].stood_s for now in (10.0, 10.5, 11.0)] == [0.0, 0.5, 1.0]
    assert stood.mark([busy(31)], 11.5)[0].stood_s == 0.0
    assert stood.mark([busy(31, is_moving=True)], 12.0)[0].stood_s == 0.0
    assert stood.mark([busy(31)], 12.5)[0].stood_s == 0.0


def test_stood_when_the_phase_began_between_two_looks_then_not() -> None:
    stood, rank = Stood(), busy()
    stood.mark([rank], 10.0)
    assert rank.record is not None
    assert stood.mark([replace(rank, record=replace(rank.record, phase_s=0.2))], 10.5)[0].stood_s == 0.0


def test_rank_that_computes_when_it_stood_at_two_looks_then_named_sooner() -> None:
    waiting = Rank(
        0,
        "gpu-a",
        pid=100,
        state="S",
        record=Record(step=30, phase="backward", phase_s=1.6, median_step_s=0.01),
    )
    assert verdict_on(waiting, busy(), trigger="waiting") is None
    verdict = verdict_on(waiting, busy(stood_s=0.5), trigger="waiting")
    assert verdict is not None and verdict.code == "AR224"
    assert verdict_on(waiting, busy(stood_s=0.5, is_moving=True), trigger="waiting") is None


def test_standing_when_a_rank_is_still_at_work_then_the_job_is_not_ended() -> None:
    verdict = Verdict("AR286", "ddp-build-met-another-call", "", (0,))
    standing = Standing(verdict, (0, 1), (), 0.0, ends_as="stop")
    assert standing.due(SECOND_LOOK_S, "report", None, is_at_work=True) is None
    said = standing.due(SECOND_LOOK_S + 1, "report", None)
    assert said is not None and said.action == "stop"


def test_standing_when_a_rank_seems_at_work_for_good_then_the_job_is_ended() -> None:
    verdict = Verdict("AR286", "ddp-build-met-another-call", "", (0,))
    standing = Standing(verdict, (0, 1), (), 0.0, ends_as="stop")
    said = standing.due(AT_WORK_S, "report", None, is_at_work=True)  # it spins, waiting for its GPU
    assert said is not None and said.action == "stop"


def joining(rank: int, at: str, world_size: int = 2) -> Rank:
    """It goes by rank 0 of so many, and waits for the others."""
    noted = ({"kind": "meets", "at": at},)
    record = Record(phase="init", phase_s=1.2, said_rank=0, said_world_size=world_size, noted=noted)
    return Rank(rank, "gpu-a", pid=100 + rank, state="S", record=record)


def test_names_when_two_worlds_meet_at_different_places_then_they_need_not_agree() -> None:
    verdict = verdict_on(joining(0, "127.0.0.1:29500"), joining(1, "gpu-a:29500"))
    assert verdict is not None and verdict.code == "AR302"
    for one, other in (("127.0.0.1:29500", "127.0.0.1:29501"), ("file:///tmp/a", "file:///tmp/b")):
        found = verdict_on(joining(0, one), joining(1, other))
        assert found is None or found.code != "AR302"


def test_names_when_each_is_a_world_of_its_own_then_nobody_waits_for_another() -> None:
    ranks = [
        joining(rank, "127.0.0.1:29500", world_size=1) for rank in (0, 1)
    ]  # with a store each: HashStore()
    found = verdict_on(*ranks)
    assert found is None or found.code != "AR302"
    rows = {n: Row(n, phase="init", phase_s=0.5, said=(0, 1)) for n in (0, 1)}
    assert not apart.signs(rows)


# --- lock files ---


def waits_for_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rank:
    monkeypatch.setattr(proc, "environment", lambda pid, name: str(tmp_path))
    monkeypatch.setattr(file_locks, "_age", lambda path: 2.0)
    stack = Stack((Place("/x/torch/utils/file_baton.py", 50, "wait"),), is_main=True)
    return Rank(1, pid=101, state="S", stacks=(stack,))


def test_lock_when_nobody_has_it_open_then_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = waits_for_build(tmp_path, monkeypatch)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "lock").touch()
    found = file_locks.file_lock_of(rank)
    assert found is not None and found.owner_alive is False
    with monkeypatch.context() as patched:  # whose files we may not look at
        patched.setattr(os, "geteuid", lambda: (tmp_path / "mine" / "lock").stat().st_uid + 1)
        found = file_locks.file_lock_of(rank)
        assert found is not None and found.owner_alive is None
    monkeypatch.setattr(proc, "file_system", lambda path: "nfs4")  # a process of another host may have it
    found = file_locks.file_lock_of(rank)
    assert found is not None and found.owner_alive is None


def test_lock_when_one_of_several_is_held_then_none_is_called_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = waits_for_build(tmp_path, monkeypatch)
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "lock").touch()
    with (tmp_path / "new" / "lock").open():
        found = file_locks.file_lock_of(rank)
    assert found is not None and found.owner_alive is True
    assert found.path.endswith("new/lock")


def test_file_system_when_asked_then_of_the_longest_mount_point() -> None:
    assert proc.file_system("/proc/self/status") == "proc"
    assert proc.file_system("/") != "proc"


def test_model_when_ddp_leaves_a_parameter_alone_then_it_is_not_compared() -> None:
    """A table that each rank has its own part of (_set_params_and_buffers_to_ignore_for_model)."""
    from types import SimpleNamespace

    from allranks.record import models

    one = SimpleNamespace(shape=(4, 2), dtype="torch.float32", requires_grad=True)
    module = SimpleNamespace(
        named_parameters=lambda: [("table.rows", one), ("head", one)],
        named_buffers=lambda: [("table.sums", one)],
        _ddp_params_and_buffers_to_ignore=["table.rows", "table.sums", "head"],
    )
    assert [row[0] for row in models._rows(module)] == ["head"]
