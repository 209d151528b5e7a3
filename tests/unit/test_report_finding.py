"""Does `allranks report` take the run that is meant, and say clearly when there is none?"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from allranks.cli.app import make_app
from allranks.cli.report import BESIDE_THE_RUN, with_file
from allranks.core.errors import UsageError
from allranks.record.rundir import create
from allranks.report.finding import Found, find, join
from support.run_directories import add_event, make_run


def report(*arguments: str | Path, home: Path) -> Result:
    """The command, in this process."""
    words = ["report", *map(str, arguments)]
    return CliRunner().invoke(make_app(words), words, env={"ALLRANKS_HOME": str(home)})


def test_find_when_named_by_path_or_below_home_then_is_that_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "digits-1", has_timeline=False)
    assert find(str(run.path), tmp_path / "elsewhere").path == run.path
    assert find("digits-1", tmp_path / "runs").path == run.path


def test_find_when_not_named_then_is_the_run_that_was_written_to_last(tmp_path: Path) -> None:
    for number, name in enumerate(("b-old", "a-new")):
        run = make_run(tmp_path / name, has_timeline=False)
        for file in (run.manifest, run.events):
            os.utime(file, (1000.0 * (number + 1),) * 2)
    (tmp_path / "c-no-run").mkdir()
    assert find("", tmp_path).path.name == "a-new"


def test_find_when_there_is_nothing_then_says_where_it_looked(tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "digits-1", has_timeline=False)
    with pytest.raises(UsageError, match=r"AR850 there is no run nowhere\n(.*\n)+.*fix:   one of digits-1"):
        find("nowhere", tmp_path / "runs")
    with pytest.raises(UsageError, match="AR850 no run was given"):
        find("", tmp_path / "nothing")


def test_find_when_it_is_no_run_then_says_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(UsageError, match=r"AR850 .* is not the directory of a run\n(.*\n)*.*it is a file"):
        find(str(tmp_path / "notes.txt"), tmp_path)
    with pytest.raises(UsageError, match=r"it is a directory without run\.json"):
        find(str(tmp_path), tmp_path / "runs")


def test_report_when_no_run_is_given_then_says_which_it_took(tmp_path: Path) -> None:
    make_run(tmp_path / "digits-1", has_timeline=False)
    done = report(home=tmp_path)
    assert done.exit_code == 0, done.output
    assert "the newest below" in done.stderr and "digits-1" in done.stderr
    assert done.stdout.startswith("train.py ended with exit code 0")


def test_report_when_there_is_no_run_then_exits_with_2_and_the_code(tmp_path: Path) -> None:
    done = report(tmp_path / "nowhere", home=tmp_path)
    assert done.exit_code == 2 and "AR850" in done.stderr and done.stdout == ""


def test_report_when_the_attempt_is_not_there_then_says_which_are(tmp_path: Path) -> None:
    run = make_run(tmp_path / "digits-1", steps=40)
    done = report(run.path, "--attempt", "3", home=tmp_path)
    assert done.exit_code == 2 and "AR851" in done.stderr and "[0]" in done.stderr


def test_report_when_all_files_are_asked_for_then_each_is_written(tmp_path: Path) -> None:
    run = make_run(tmp_path / "digits-1", steps=40)
    done = report(run.path, "--json", "--html", "--trace", tmp_path / "trace.json", home=tmp_path)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["schema"] == "allranks-report/1"
    assert (run.path / "report.html").read_text().startswith("<!doctype html>")
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_report_when_a_file_cannot_be_written_then_exits_with_3(tmp_path: Path) -> None:
    run = make_run(tmp_path / "digits-1", has_timeline=False)
    done = report(run.path, "--html", tmp_path / "missing" / "page.html", home=tmp_path)
    assert done.exit_code == 3 and "cannot be written" in done.stderr


def test_html_when_its_file_is_left_out_then_the_run_is_not_taken_for_it(tmp_path: Path) -> None:
    bare = f"--html={BESIDE_THE_RUN}"
    assert with_file(["RUN", "--html"]) == ["RUN", bare]
    assert with_file(["--html", "--json"]) == [bare, "--json"]
    assert with_file(["--html", str(tmp_path)]) == [bare, str(tmp_path)]
    assert with_file(["--html", "page.html", "RUN"]) == ["--html", "page.html", "RUN"]


def test_join_when_the_script_named_a_directory_then_either_finds_the_other(tmp_path: Path) -> None:
    launched = make_run(tmp_path / "runs" / "digits-1", has_timeline=False)
    trained = create(tmp_path / "runs" / "digits")
    trained.metrics.write_text('{"step": 3, "time": 1.0, "loss": 0.5}\n')
    add_event(trained, 5, "checkpoint", step=3, folder="step-00000003")
    add_event(launched, 1, "directory", path=str(trained.path))
    for named in (launched.path, trained.path):
        found = json.loads(report(named, "--json", home=tmp_path / "runs").stdout)
        assert found["run"]["path"] == str(launched.path) and found["run"]["trained"] == str(trained.path)
        assert found["metrics"]["loss"]["last"]["value"] == 0.5 and found["checkpoints"][0]["step"] == 3
        assert found["end"]["exit_code"] == 0


def test_join_when_nobody_names_it_then_it_is_alone(tmp_path: Path) -> None:
    make_run(tmp_path / "digits-1", has_timeline=False)
    alone = create(tmp_path / "digits")
    alone.metrics.write_text('{"step": 3, "time": 1.0, "loss": 0.5}\n')
    assert join(alone, tmp_path) == Found(alone, alone)
