"""Does a trace keep the rules of the Trace Event Format, and say who waited for whom?"""

from __future__ import annotations

import json
from pathlib import Path

from allranks.perf.history import row_of_call
from allranks.perf.values import CallTimes
from allranks.report.making import make
from allranks.report.trace_events import COLLECTIVES, JOB, MAIN, as_trace
from support.histories import Doing
from support.run_directories import BEGAN, NAN_VERDICT, add_event, make_run
from support.trace_rules import check, slices


def test_trace_when_ranks_wait_then_is_valid_and_arrows_lead_to_the_last(tmp_path: Path) -> None:
    ranks = [Doing(worker_busy=3.0), Doing(), Doing(data=14.0)]
    run = make_run(tmp_path, ranks, nodes=3, clock_ahead_s=-7.0, steps=60, verdicts=[NAN_VERDICT])
    add_event(run, 12, "checkpoint", step=30, folder="step-00000030")
    events = check(as_trace(make(run, BEGAN)))
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {0: "rank 0", 1: "rank 1", 2: "rank 2", JOB: "job"}
    arrows = [e for e in events if e["ph"] == "f"]
    assert arrows and {e["pid"] for e in arrows} == {2}
    assert {e["name"] for e in events if e["ph"] == "i"} == {NAN_VERDICT.head(), "checkpoint of step 30"}
    assert "loader workers busy" in {e["name"] for e in events if e["ph"] == "C" and e["pid"] == 0}


def test_trace_when_a_step_is_recorded_then_its_parts_are_inside_it(tmp_path: Path) -> None:
    events = check(as_trace(make(make_run(tmp_path, [Doing(), Doing(data=14.0)], steps=40), BEGAN)))
    main = slices(events)[0, MAIN]
    begin, end, _ = next(s for s in main if s[2] == "step 40")
    inside = {name for b, e, name in main if begin <= b and e <= end + 0.01} - {"step 40"}
    assert inside == {
        "data wait", "forward", "backward compute", "waiting for a slower rank", "gradient exchange not hidden", "optimizer"
    }  # fmt: skip


def test_trace_when_the_script_calls_collectives_then_they_are_joined(tmp_path: Path) -> None:
    run = make_run(tmp_path, [Doing(), Doing()], steps=40)
    file = run.path / "timeline" / "node0.jsonl"
    for rank, entered in ((0, 5.4), (1, 5.45)):
        calls = [CallTimes("all_reduce", "default", 7, 3, entered, 5.46, "train.py:9", 4096)]
        calls.append(CallTimes("barrier", "default", 8, 3, 5.5, None))  # it did not come back
        line = {"kind": "calls", "rank": rank, "rows": [row_of_call(c) for c in calls]}
        file.write_text(file.read_text() + json.dumps(line) + "\n")
    events = check(as_trace(make(run, BEGAN)))
    call = next(e for e in events if e["name"] == "all_reduce" and e["ph"] == "X" and e["pid"] == 1)
    assert call["tid"] == COLLECTIVES and call["args"]["line"] == "train.py:9"
    (arrow,) = [e for e in events if e["ph"] == "f" and e["name"] == "all_reduce"]
    assert arrow["pid"] == 1
    assert any(
        e["args"].get("note") == "it did not come back"
        for e in events
        if e["name"] == "barrier" and e["ph"] == "X"
    )


def test_trace_when_there_are_no_times_then_holds_what_there_is(tmp_path: Path) -> None:
    trace = as_trace(make(make_run(tmp_path, has_timeline=False, verdicts=[NAN_VERDICT]), BEGAN))
    (event,) = check(trace)
    assert event["ph"] == "i" and any("no times of steps" in text for text in trace["otherData"]["missing"])


def test_trace_when_a_rank_needs_no_time_to_exchange_then_an_arrow_still_ends_on_it(tmp_path: Path) -> None:
    run = make_run(tmp_path, [Doing(), Doing(data=14.0)], steps=40, exchange_ms=0.0)
    events = check(as_trace(make(run, BEGAN)))
    assert any(event["ph"] == "f" for event in events)
