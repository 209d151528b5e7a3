"""Does a report say how a run really ended, and what was kept, also of one that was killed, restarted or half written?"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from allranks.record.rundir import create
from allranks.report import facts as facts_of
from allranks.report.facts import Facts, read
from allranks.report.metrics import read_series
from allranks.watch import proc
from support.run_directories import BEGAN, NAN_VERDICT, add_event, add_verdict, make_run

NOT_ENDED = {"exit_code": None, "exit_codes": None, "ended_at": None}


def facts(run, now: float = BEGAN + 3600) -> Facts:
    return read(run, now)


def test_run_when_it_ended_well_then_says_so(tmp_path: Path) -> None:
    found = facts(make_run(tmp_path, has_timeline=False))
    assert (found.state, found.exit_code, found.wall_s) == ("ended", 0, 60.0)
    assert found.hosts == {0: "node0", 1: "node0"} and found.command.startswith("allranks run --nproc 2")


def test_run_when_it_failed_then_has_the_code_and_the_last_lines(tmp_path: Path) -> None:
    run = make_run(tmp_path, has_timeline=False, about={"exit_code": 137, "exit_codes": {"0": 0, "1": -9}})
    run.ranks.mkdir()
    run.rank_log(1).write_text("".join(f"line {n}\n" for n in range(100)))
    found = facts(run)
    assert found.state == "failed" and found.why == "exit code 137 (SIGKILL)"
    assert found.tails[1][-1] == "line 99" and 0 not in found.tails


def test_run_when_its_launcher_is_gone_without_a_word_then_was_killed(tmp_path: Path) -> None:
    found = facts(make_run(tmp_path, has_timeline=False, about=NOT_ENDED))
    assert found.state == "killed" and "without a word" in found.why


def test_run_when_a_process_of_it_lives_then_goes_on(tmp_path: Path) -> None:
    run = make_run(tmp_path, has_timeline=False, about=NOT_ENDED)
    env = {**os.environ, "ALLRANKS_RUN_DIR": str(run.path)}
    code = "print('here', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-S", "-c", code], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "here\n"
        assert facts(run).state == "running"
        process.communicate("\n")
    assert facts(run).state == "killed"


@pytest.mark.parametrize(("late", "state"), [(0, "running"), (1, "killed")])
def test_run_when_its_launcher_lives_between_two_attempts_then_goes_on(
    tmp_path: Path, late: int, state: str
) -> None:
    me = {
        "launcher_pid": os.getpid(),
        "launcher_started": proc.started(os.getpid()) + late,
    }  # or one of that pid before
    about = {**NOT_ENDED, "host": socket.gethostname(), **me}
    assert facts(make_run(tmp_path, has_timeline=False, about=about)).state == state


@pytest.mark.parametrize(("quiet_s", "state"), [(5.0, "running"), (4000.0, "unknown")])
def test_run_when_it_is_of_another_host_then_its_last_sign_decides(
    tmp_path: Path, quiet_s: float, state: str
) -> None:
    run = make_run(tmp_path, has_timeline=False, about={**NOT_ENDED, "host": "somewhere-else"})
    now = max(file.stat().st_mtime for file in (run.manifest, run.events)) + quiet_s
    assert read(run, now).state == state


def test_run_when_started_again_in_its_directory_then_the_old_end_does_not_count(tmp_path: Path) -> None:
    again = {"started_at": "2027-01-15T09:00:00+00:00"}
    found = facts(make_run(tmp_path, has_timeline=False, about=again))
    assert (found.state, found.exit_code, found.ended) == ("killed", None, None)


def test_run_when_not_started_by_allranks_then_says_that(tmp_path: Path) -> None:
    run = create(tmp_path)
    run.metrics.write_text('{"step": 1, "time": 100.0, "loss": 2.0}\n')
    found = facts(run)
    assert found.state == "unknown" and "not started by allranks run" in found.why
    assert found.started == 100.0 and found.name == tmp_path.name


def test_attempts_when_restarted_then_each_has_its_end_and_cause(tmp_path: Path) -> None:
    run = make_run(tmp_path, has_timeline=False, about={"restarts": 1})
    add_event(run, 10, "end-of-attempt", restart=0, exits=[], code="AR201")
    add_event(run, 12, "start", restart=1, world_size=2)
    add_event(run, 20, "stop", step=50, reason="signal")  # the script's own word is not the end
    add_event(run, 30, "stop", exit_code=0, text="", code="")
    first, second = facts(run).attempts
    assert (first.ended, first.code) == (BEGAN + 10, "AR201")
    assert (second.began, second.ended, second.code) == (BEGAN + 12, BEGAN + 30, "")


def test_verdicts_when_said_again_then_are_one_with_a_count(tmp_path: Path) -> None:
    run = make_run(tmp_path, has_timeline=False, verdicts=[NAN_VERDICT])
    add_verdict(run, 2, NAN_VERDICT)
    (run.diagnosis / "003-AR201.json").write_text('{"code": "AR201", "wh')  # killed while it was written
    (told,) = facts(run).verdicts
    assert told.verdict == NAN_VERDICT and told.times == 2
    assert told.page == "diagnosis/001-AR730.md" and told.unix_time == BEGAN + 10


def test_verdicts_when_only_the_launcher_spoke_then_its_story_is_told(tmp_path: Path) -> None:
    run = make_run(tmp_path, has_timeline=False)
    add_event(run, 5, "verdict", code="AR201", text="AR201 rank 1 was killed\n  logs:  x")
    (told,) = facts(run).verdicts
    assert told.verdict.head() == "AR201 rank 1 was killed" and told.verdict.quoted == ("logs:  x",)


def test_checkpoints_when_some_were_removed_then_have_no_size(tmp_path: Path) -> None:
    run = make_run(tmp_path, has_timeline=False)
    for step in (100, 200):
        add_event(run, step / 10, "checkpoint", step=step, folder=f"step-{step:08d}")
    kept = run.checkpoints / "step-00000200"
    kept.mkdir(parents=True)
    (kept / "model.safetensors").write_bytes(b"x" * 1000)
    (run.checkpoints / "step-00000300.tmp-ab").mkdir()
    assert [(c.step, c.size_bytes) for c in facts(run).checkpoints] == [(100, None), (200, 1000)]


def test_last_lines_when_the_log_is_long_and_binary_then_are_the_end(tmp_path: Path) -> None:
    log = tmp_path / "rank0.log"
    log.write_bytes(b"\xff" * (facts_of.TAIL_BYTES * 3) + b"\nlast\n")
    assert facts_of.last_lines(log)[-1] == "last"
    assert facts_of.last_lines(tmp_path / "none.log") == ()


def test_series_when_steps_are_taken_again_then_the_later_counts() -> None:
    rows = [{"step": s, "time": s, "loss": 10.0 - s} for s in (1, 2, 3, 4)]
    rows += [{"step": s, "time": 9 + s, "loss": 20.0 - s} for s in (3, 4)]
    logged = read_series(rows)
    assert [(p.step, p.value) for p in logged.series["loss"].points] == [
        (1, 9.0),
        (2, 8.0),
        (3, 17.0),
        (4, 16.0),
    ]
    assert logged.num_replaced == 2


def test_series_when_values_are_of_all_kinds_then_numbers_are_kept() -> None:
    logged = read_series(
        [
            {"step": 1, "loss": "nan", "note": "x", "ok": True, "train": {"acc": 0.5}, "list": [1]},
            {"step": 2, "loss": 1.5, "train": {"acc": 0.75}},
            {"step": "inf", "loss": 7.0},
            {"loss": 8.0},
        ]
    )
    assert set(logged.series) == {"loss", "train.acc"}
    loss, accuracy = logged.series["loss"], logged.series["train.acc"]
    assert loss.first_not_finite is not None and loss.first_not_finite.step == 1
    assert loss.best() == loss.last and loss.direction == "lowest"
    assert accuracy.direction == "highest" and accuracy.best().value == 0.75


def test_metrics_when_the_last_line_is_half_written_then_the_rest_counts(tmp_path: Path) -> None:
    run = make_run(tmp_path, has_timeline=False)
    run.metrics.write_text('{"step": 1, "time": 1, "loss": 2.0}\n{"step": 2, "time": 2, "lo')
    assert facts(run).logged.series["loss"].last.step == 1
