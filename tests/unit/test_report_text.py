"""Do the text and the JSON of a report say the truth of runs of every kind, and what is missing?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from allranks.perf.breakdown import PARTS
from allranks.report.as_data import as_json
from allranks.report.as_text import as_text
from allranks.report.making import Report, make
from support.histories import Doing
from support.run_directories import BEGAN, NAN_VERDICT, make_run

LATE = Doing(data=14.0)


def report(folder: Path, *args, **kwargs) -> Report:
    return make(make_run(folder, *args, **kwargs), BEGAN + 3600)


def data(found: Report) -> dict:
    return json.loads(json.dumps(as_json(found), allow_nan=False))


def test_text_when_a_rank_is_late_then_names_it_and_what_it_costs(tmp_path: Path) -> None:
    text = as_text(report(tmp_path, [Doing(), Doing(), LATE], steps=150))
    assert "150 steps, 35.0 ms each (median)" in text.replace("35 ms", "35.0 ms")
    rows = [line.split() for line in text.splitlines() if line.startswith("  rank ")]
    assert [row[1] for row in rows[:3]] == ["0", "1", "2"]
    assert [float(row[2]) for row in rows[:3]] == pytest.approx([35.0] * 3, rel=0.02)
    assert "rank 2" in text and "straggler" in text
    assert all(line == line.rstrip() for line in text.splitlines()) and "\x1b" not in text


def test_text_when_colours_are_wanted_then_has_them(tmp_path: Path) -> None:
    found = report(tmp_path, steps=40)
    assert "\x1b[" in as_text(found, width=100, color=True)
    assert max(map(len, as_text(found, width=60).splitlines())) <= 60


def test_text_when_there_is_one_rank_then_nobody_is_waited_for(tmp_path: Path) -> None:
    text = as_text(report(tmp_path, [Doing()], steps=120))
    assert "rank 0" in text and "straggler" not in text


def test_text_when_there_are_many_ranks_then_shows_those_that_do_most(tmp_path: Path) -> None:
    ranks = [Doing() for _ in range(20)]
    ranks[18] = LATE
    text = as_text(report(tmp_path, ranks, steps=40))
    assert "  rank 18" in text and "4 more ranks do less themselves" in text


@pytest.mark.parametrize(
    ("about", "said"),
    [
        ({}, "no metrics: the script did not call run.log(...)"),
        ({}, "no checkpoints in this directory"),
        ({"exit_code": None, "exit_codes": None, "ended_at": None}, "was killed"),
        ({"exit_code": 3}, "failed with exit code 3"),
    ],
)
def test_text_when_something_is_missing_then_says_what(tmp_path: Path, about: dict, said: str) -> None:
    assert said in as_text(report(tmp_path, has_timeline=False, about=about))


def test_text_when_it_was_not_watched_then_says_why_there_are_no_times(tmp_path: Path) -> None:
    run = make_run(tmp_path, has_timeline=False)
    run.append_event("no-watch", why="asked for")
    text = as_text(make(run, BEGAN))
    assert "no times of steps, no heat map, no timeline: it ran with --no-watch" in text


def test_text_when_a_node_has_left_no_file_then_names_its_ranks(tmp_path: Path) -> None:
    run = make_run(tmp_path, [Doing() for _ in range(4)], nodes=2, steps=40)
    (run.path / "timeline" / "node1.jsonl").unlink()
    assert "no times of rank 2, 3" in as_text(make(run, BEGAN))


def test_text_when_the_last_line_of_the_timeline_is_cut_then_the_rest_counts(tmp_path: Path) -> None:
    run = make_run(tmp_path, steps=80)
    file = run.path / "timeline" / "node0.jsonl"
    file.write_text(file.read_text() + '{"kind": "sample", "t": 99.0, "ro')
    assert data(make(run, BEGAN))["times"]["steps"] == 80


def test_text_when_the_run_only_began_then_says_too_few(tmp_path: Path) -> None:
    text = as_text(report(tmp_path, steps=1))
    assert "too few to say" in text and "no rank came to the end of two steps" in text


def test_text_when_restarted_then_each_attempt_has_its_times(tmp_path: Path) -> None:
    run = make_run(tmp_path, steps=80)
    file = run.path / "timeline" / "node0.jsonl"
    first = file.read_text()
    make_run(tmp_path, steps=120)
    file.write_text(first + file.read_text().replace('"attempt": 0', '"attempt": 1'))
    last = make(run, BEGAN)
    assert data(last)["times"]["steps"] == 120 and data(make(run, BEGAN, attempt=0))["times"]["steps"] == 80
    assert "times are those of attempt 1; --attempt 0 to 1 shows the others" in as_text(last)


def test_text_then_says_what_the_start_took(tmp_path: Path) -> None:
    text = as_text(report(tmp_path, steps=40))
    assert "before the first step: imports 3.0 s, joining the ranks 1.0 s" in text


def test_text_when_names_hold_control_codes_then_the_terminal_is_not_told(tmp_path: Path) -> None:
    metrics = [{"step": 1, "time": 1.0, "lo\x1b]0;gone\x07ss[red]": 1.0}]
    text = as_text(report(tmp_path, has_timeline=False, metrics=metrics))
    assert "\x1b" not in text and "\x07" not in text and "ss[red]" in text


def test_json_when_hosts_have_other_clocks_then_the_ranks_meet(tmp_path: Path) -> None:
    ranks = [Doing(), Doing(), Doing(), LATE]
    times = data(report(tmp_path, ranks, nodes=2, clock_ahead_s=400.0, steps=150))["times"]
    waiting = [rank["parts_s"]["waiting"] for rank in times["ranks"]]
    assert waiting == pytest.approx([0.013, 0.013, 0.013, 0.0], abs=1e-3)
    assert times["straggler"]["rank"] == 3 and times["came_last"]["3"] > 10


def test_json_then_the_parts_add_up_to_the_step(tmp_path: Path) -> None:
    times = data(report(tmp_path, [Doing(), LATE], steps=150))["times"]
    assert list(times["parts"]) == list(PARTS)
    for rank in times["ranks"]:
        assert sum(rank["parts_s"].values()) == pytest.approx(rank["step_s"], rel=0.05)


def test_json_when_a_loss_became_nan_then_it_is_valid_and_says_since_when(tmp_path: Path) -> None:
    metrics = [{"step": s, "time": BEGAN + s, "loss": "nan" if s > 2 else 1.0 / s} for s in (1, 2, 3, 4)]
    found = data(report(tmp_path, has_timeline=False, metrics=metrics, verdicts=[NAN_VERDICT]))
    assert found["metrics"]["loss"]["first_not_finite"] == 3
    assert found["metrics"]["loss"]["last"] == {"step": 4, "value": "nan"}
    assert found["metrics"]["loss"]["best"] == {"step": 2, "value": 0.5}
    assert found["verdicts"][0]["code"] == "AR730" and found["end"]["exit_code"] == 0


def test_json_then_its_keys_are_those_of_the_page(tmp_path: Path) -> None:
    found = data(report(tmp_path, steps=40))
    text = (Path(__file__).parents[2] / "docs" / "how-to" / "read-a-report.md").read_text()
    for key in [*found, *found["times"], *found["run"], *found["end"]]:
        assert f"`{key}`" in text, f"{key} is not described"
