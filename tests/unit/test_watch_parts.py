"""Do the parts of the watcher that are pure do what they say: parsing, trigger, slowness, saying?"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from allranks.watch import source
from allranks.watch.evidence import Call, Evidence, Record
from allranks.watch.reading import seen_on
from allranks.watch.rows import Row, hash_of, row_of
from allranks.watch.saying import SECOND_LOOK_S, Said, Standing, action_at_once, action_later, keep
from allranks.watch.slowness import Slowness, compare
from allranks.watch.stacks import (
    main_stack,
    parse_faulthandler,
    parse_pyspy,
    parse_traceback,
    runs_model,
    user_place,
)
from allranks.watch.trigger import Trigger
from allranks.watch.verdict import Alternative, Place, Verdict, ranks_text

DUMP = """Fatal Python error: Aborted

Thread 0x00007f01 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait
  File "/home/ann/train.py", line 9 in helper

Current thread 0x00007f02 (most recent call first):
  File "/opt/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 10 in all_reduce
  File "/home/ann/train.py", line 27 in main
"""

CHAIN = """noise
[rank1]: Traceback (most recent call last):
[rank1]:   File "/home/ann/train.py", line 5, in read
[rank1]:     return table[key]
[rank1]:            ~~~~~^^^^^
[rank1]: KeyError: 'label'

[rank1]: The above exception was the direct cause of the following exception:

[rank1]: Traceback (most recent call last):
[rank1]:   File "/home/ann/train.py", line 9, in main
[rank1]:     raise ValueError("no label") from error
[rank1]: ValueError: no label
[rank1]: in shard 7
after
""".splitlines()


def test_faulthandler_when_a_crash_is_in_it_then_reason_and_main_thread_are_read() -> None:
    reason, stacks = parse_faulthandler(DUMP)
    assert reason == "Aborted"
    assert [len(s.frames) for s in stacks] == [2, 2]
    assert user_place(main_stack(stacks).frames) == Place("/home/ann/train.py", 27, "main")  # type: ignore[union-attr]


def test_pyspy_when_json_is_broken_then_no_stack() -> None:
    assert parse_pyspy("{") == ()
    text = json.dumps(
        [{"pid": 7, "os_thread_id": 7, "frames": [{"filename": "a.py", "line": 3, "name": "f"}]}]
    )
    assert parse_pyspy(text)[0].is_main


@pytest.mark.parametrize("before", ["", "_mark.<locals>."])
def test_pyspy_when_names_are_qualified_then_what_a_light_step_does_is_still_found(before: str) -> None:
    where = [
        ("/home/ann/train.py", f"{before}block"),
        (
            "/opt/venv/lib/python3.11/site-packages/allranks/record/probe_training.py",
            f"{before}marked_forward",
        ),
        ("/opt/venv/lib/python3.11/site-packages/torch/nn/modules/module.py", f"{before}_call_impl"),
        ("/home/ann/train.py", "<module>"),
    ]
    frames = [{"filename": file, "line": 3, "name": name} for file, name in where]
    stack = parse_pyspy(json.dumps([{"pid": 7, "os_thread_id": 7, "frames": frames}]))[0]
    found = seen_on(stack, Record(phase="python"))
    assert (found.phase, found.where) == ("forward", Place("/home/ann/train.py", 3, "block"))
    assert runs_model(stack)


def test_traceback_when_chained_then_the_last_is_told_with_its_cause() -> None:
    failure = parse_traceback(CHAIN)
    assert failure is not None
    assert (failure.kind, failure.message, failure.cause) == (
        "ValueError",
        "no label\nin shard 7",
        "KeyError: 'label'",
    )
    assert failure.frames[0] == Place(
        "/home/ann/train.py", 9, "main", 'raise ValueError("no label") from error'
    )
    assert failure.text[-1] == "in shard 7"


def test_traceback_when_there_is_none_then_nothing() -> None:
    assert parse_traceback(["epoch 1", "ValueError: said by the script"]) is None


def test_guard_when_a_call_stands_under_a_condition_on_the_rank_then_its_line_is_found() -> None:
    text = "for x in y:\n    if rank == 0 and x:\n        barrier()\n    if x:\n        barrier()\n"
    assert source.rank_guard(text, 3) == 2
    assert source.rank_guard(text, 5) is None
    assert source.rank_guard("if (", 1) is None


LOOPS = """
for epoch in range(9):
    for x in data:
        step(x)
    validate()
barrier()

def train():
    def inner():
        for x in data:
            step(x)
    while True:
        inner()
    return 1
"""


def test_loop_when_a_line_is_in_several_then_the_outermost_of_its_function() -> None:
    lines = {k: source.outer_loop(LOOPS, k) for k in (2, 4, 5, 6, 11, 13, 14)}
    assert lines == {2: (2, 5), 4: (2, 5), 5: (2, 5), 6: None, 11: (10, 11), 13: (12, 13), 14: None}
    assert source.outer_loop("for x in", 1) is None


def test_ranks_when_put_into_words_then_runs_are_short() -> None:
    words = [ranks_text(r) for r in ([3], [0, 1], [0, 1, 2], [0, 1, 2, 5, 7])]
    assert words == ["rank 3", "ranks 0 and 1", "ranks 0-2", "ranks 0-2, 5 and 7"]


# --- rows and trigger ---


def at(rank: int, phase: str, phase_s: float, **more: object) -> Row:
    return Row(
        rank, **{"state": "S", "phase": phase, "phase_s": phase_s, "step": 9, "median_step_s": 0.01, **more}
    )


def kind_of(trigger: Trigger, *rows: Row, now: float = 100.0) -> str:
    found = trigger.look({r.rank: r for r in rows}, now)
    return found.kind if found else ""


def test_row_when_it_goes_to_json_and_back_then_it_is_the_same_and_small() -> None:
    calls = tuple(
        Call("all_reduce", seq=n, shape=(64,), numel=64, where=Place("/a/train.py", n, "main"))
        for n in range(20)
    )
    row = row_of(
        3, "S", Record(step=7, phase="backward", phase_s=1.25, calls=calls, where=Place("/a/train.py", 2)), 11
    )
    text = json.dumps(row.to_json())
    assert Row.from_json(json.loads(text)) == row
    assert len(text) < 700


def test_trigger_when_one_waits_and_the_other_does_not_then_it_looks_once() -> None:
    trigger = Trigger()
    rows = at(0, "backward", 1.1), at(1, "python", 1.1)
    assert kind_of(trigger, *rows) == "waiting"
    assert kind_of(trigger, *rows) == ""
    assert kind_of(trigger, *(replace(r, phase_s=3.0) for r in rows)) == "waiting"


def test_trigger_when_steps_are_long_then_ten_of_them_are_waited_for() -> None:
    rows = [replace(r, median_step_s=0.5) for r in (at(0, "backward", 4.0), at(1, "python", 4.0))]
    assert kind_of(Trigger(), *rows) == ""


def test_trigger_when_all_are_in_the_same_phase_then_silence_is_no_alarm() -> None:
    assert kind_of(Trigger(), at(0, "forward", 60.0, seq=4), at(1, "forward", 60.0, seq=4)) == ""
    assert kind_of(Trigger(), at(0, "checkpoint", 60.0), at(1, "checkpoint", 60.0)) == ""


def test_trigger_when_stopped_then_at_the_next_poll() -> None:
    trigger, rows = Trigger(), (at(0, "backward", 0.1), at(1, "python", 0.1, state="T"))
    assert [kind_of(trigger, *rows, now=n) for n in (1.0, 1.1, 1.2)] == ["", "stopped", ""]


def test_trigger_when_calls_of_one_number_differ_then_mismatch_at_once() -> None:
    trigger = Trigger()
    rows = at(0, "python", 0.0, tail=(("0", 5, 111),)), at(1, "python", 0.0, tail=(("0", 5, 222),))
    assert [kind_of(trigger, *rows), kind_of(trigger, *rows)] == ["mismatch", ""]
    same = (
        at(0, "python", 0.0, tail=(("0", 5, 111),)),
        at(1, "python", 0.0, tail=(("0", 5, 111), ("0", 6, 7))),
    )
    assert kind_of(Trigger(), *same) == ""


def test_trigger_when_an_exception_is_on_its_way_then_nothing_else_is_said() -> None:
    trigger = Trigger()
    rows = at(0, "backward", 9.0), at(1, "python", 0.0, is_dying=True)
    assert [kind_of(trigger, *rows, now=n) for n in (1.0, 1.1, 1.25, 1.3)] == ["", "", "dying", ""]


def test_trigger_when_ctrl_c_reached_a_rank_then_nothing_is_looked_at() -> None:
    rows = at(0, "backward", 9.0), at(1, "exit", 5.0, is_interrupted=True)
    assert kind_of(Trigger(), *rows) == ""


def test_trigger_when_nobody_moves_for_long_then_a_quiet_look() -> None:
    trigger, rows = Trigger(), (at(0, "python", 1.0, marks=5), at(1, "python", 1.0, marks=6))
    assert [kind_of(trigger, *rows, now=n) for n in (0.0, 9.0, 10.5, 11.0, 31.0)] == [
        "",
        "",
        "silence",
        "",
        "silence",
    ]


def test_hash_when_calls_differ_in_what_must_agree_then_it_differs() -> None:
    call = Call("broadcast", shape=(4,), numel=4, dtype="float32", root=0, where=Place("/x/a.py", 3, "f"))
    changed = [
        replace(call, root=1),
        replace(call, numel=5),
        replace(call, dtype="int32"),
        replace(call, where=Place("/x/a.py", 4)),
    ]
    assert len({hash_of(c) for c in (call, *changed)}) == 5
    assert hash_of(call) == hash_of(replace(call, where=Place("/elsewhere/a.py", 3, "f"), age_s=9.0))


# --- slowness ---


def working(rank: int, steps: int, work_s: float, wait_s: float) -> Row:
    return Row(rank, state="S", step=steps, work_s=work_s, wait_s=wait_s, phases_s=(work_s, 0, 0, 0, 0, 0))


def test_slowness_when_one_works_longer_and_the_others_wait_then_it_is_named() -> None:
    before = {n: working(n, 100, 1.0, 1.0) for n in range(3)}
    after = {0: working(0, 140, 1.4, 4.6), 1: working(1, 140, 1.4, 4.6), 2: working(2, 140, 4.8, 1.2)}
    slow = compare(before, after, 4.0)
    assert slow is not None
    assert (slow.rank, slow.phase) == (2, "python")
    assert abs(slow.excess_s - 0.085) < 1e-9


def test_slowness_when_all_are_equally_slow_then_nobody_is() -> None:
    before = {n: working(n, 100, 1.0, 1.0) for n in range(2)}
    after = {n: working(n, 140, 4.8, 1.2) for n in range(2)}
    assert compare(before, after, 4.0) is None


def in_backward(rank: int, steps: int, compute_s: float, exchange_s: float, buffers_s: float = 0.0) -> Row:
    """A rank whose forward and backward are timed: a quarter of its steps."""
    backward = compute_s + exchange_s
    return Row(
        rank,
        state="S",
        step=steps,
        work_s=0.01 * steps + buffers_s,
        wait_s=backward,
        phases_s=(0, 0, 0.01 * steps + buffers_s, 0, 0, 0),
        exchanged=(backward, buffers_s, exchange_s / 4, backward / 4),
    )


def test_slowness_when_one_computes_longer_in_its_backward_then_it_is_named_and_not_who_waits() -> None:
    before = {n: in_backward(n, 100, 1.0, 1.0) for n in range(2)}
    after = {0: in_backward(0, 140, 1.4, 3.0), 1: in_backward(1, 140, 3.2, 1.2)}
    slow = compare(before, after, 4.0)
    assert slow is not None
    assert (slow.rank, slow.phase) == (1, "backward")
    assert abs(slow.excess_s - 0.045) < 1e-9


def test_slowness_when_ranks_wait_for_buffers_in_forward_then_that_is_no_work() -> None:
    before = {n: in_backward(n, 100, 1.0, 1.0) for n in range(2)}
    after = {0: in_backward(0, 140, 3.2, 1.2), 1: in_backward(1, 140, 1.4, 1.2, buffers_s=1.8)}
    slow = compare(before, after, 4.0)
    assert slow is not None
    assert slow.rank == 0


def test_slowness_when_it_lasts_a_whole_window_then_only_then() -> None:
    slowness, found = Slowness(), []
    for tenth in range(80):
        now, steps = tenth / 10, 100 + tenth
        rows = {0: working(0, steps, 0.02 * steps, 0.08 * steps), 1: working(1, steps, 0.1 * steps, 0.0)}
        found.append(slowness.look(rows, now))
    assert all(f is None for f in found[:40])
    last = [f for f in found[-5:] if f is not None]  # it looks three times a second
    assert {f.rank for f in last} == {1}


def test_slowness_when_one_rank_saves_once_then_it_is_no_straggler() -> None:
    slowness, found = Slowness(), []
    for tenth in range(100):
        now, steps = tenth / 10, 100 + 5 * tenth
        extra = 2.0 if tenth >= 50 else 0.0  # rank 1 worked alone for 2 s, once
        rows = {
            0: working(0, steps, 0.01 * steps, 0.01 * steps + extra),
            1: working(1, steps, 0.01 * steps + extra, 0.01 * steps),
        }
        found.append(slowness.look(rows, now))
    assert not any(found)


# --- verdict and what is done about it ---

VERDICT = Verdict(
    "AR221",
    "rank-stopped",
    "rank 1 on gpu-a is stopped (SIGSTOP, state T); rank 0 waits for it",
    (1,),
    ("gpu-a",),
    ("train.py:27 in main:  loss.backward()",),
    3.1,
    31,
    "rank 0 waits in the gradient all-reduce (train.py:24 loss.backward())",
    ("process state T",),
    "kill -CONT 4711",
    alternatives=(Alternative("AR222", "a dead disk", "its state"),),
)


def test_verdict_when_shown_then_head_and_labels_are_in_order() -> None:
    text = VERDICT.text()
    assert text.splitlines()[0] == f"AR221 {VERDICT.what}"
    assert [x.split(":")[0].strip() for x in text.splitlines()[1:]] == [
        "where",
        "since",
        "others",
        "why",
        "do",
        "or",
        "more",
    ]
    assert "\x1b[" not in text and "\x1b[1;31m" in VERDICT.text(color=True)


def test_verdict_when_it_goes_to_json_and_back_then_it_is_the_same() -> None:
    assert Verdict.from_json(json.loads(json.dumps({**VERDICT.to_json(), "new": 1}))) == VERDICT


def test_action_when_the_job_cannot_go_on_then_stop_else_report() -> None:
    dead = replace(VERDICT, can_go_on=False)
    assert action_at_once(VERDICT, "stop") == "report"
    assert action_at_once(dead, "report") == "stop"
    assert action_at_once(dead, "restart") == "restart"
    assert action_at_once(replace(dead, confidence="likely"), "stop") == "report"
    assert [action_later(VERDICT, "stop", 600.0, s) for s in (599.0, 600.0)] == ["report", "stop"]


def test_standing_when_job_cannot_go_on_then_it_is_ended_after_a_second_look() -> None:
    standing = Standing(VERDICT, (0, 1), (), 0.0, ends_as="stop")
    assert standing.due(SECOND_LOOK_S / 2, "report", None) is None
    said = standing.due(SECOND_LOOK_S, "report", None)
    assert said is not None and said.action == "stop" and "nothing has moved" in said.note
    assert VERDICT.what not in said.shown() and said.note in said.shown()
    assert VERDICT.what in said.text()
    assert standing.due(SECOND_LOOK_S + 1, "report", None) is None


def test_standing_hang_when_it_goes_on_then_it_is_reported_at_1_10_and_30_minutes() -> None:
    standing = Standing(VERDICT, (1,), (), 0.0)
    times = [now for now in range(0, 4000, 10) if standing.due(float(now), "report", None)]
    assert times == [60, 600, 1800]
    acting = Standing(VERDICT, (1,), (), 0.0)
    said = [s.action for now in range(0, 400, 10) if (s := acting.due(float(now), "stop", 300.0))]
    assert said == ["report", "stop"]


def test_verdict_when_kept_twice_then_once_in_the_run_directory(tmp_path: Path) -> None:
    said = Said(VERDICT).to_json()
    keep(tmp_path / "diagnosis", said, Evidence(world_size=2, ranks=()))
    keep(tmp_path / "diagnosis", said, None)
    keep(tmp_path / "diagnosis", Said(VERDICT).to_json(), None)
    assert sorted(p.name for p in (tmp_path / "diagnosis").iterdir()) == [
        "001-AR221.json", "001-AR221.md", "002-AR221.json", "002-AR221.md",
    ]  # fmt: skip
    assert json.loads((tmp_path / "diagnosis" / "001-AR221.json").read_text())["evidence"] == {
        "world_size": 2,
        "ranks": [],
    }
