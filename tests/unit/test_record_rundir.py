"""Does the run directory keep what it is given, whoever writes?"""

from __future__ import annotations

import threading
from pathlib import Path

from allranks.record.rundir import append_line, create, create_new, read_lines


def test_create_new_when_same_second_then_another_name(tmp_path: Path) -> None:
    runs = [create_new("/x/train digits.py", tmp_path / "a b", now=1_700_000_000) for _ in range(3)]
    names = [run.path.name for run in runs]
    assert names[0].startswith("train digits-2023")
    assert names[1:] == [f"{names[0]}-2", f"{names[0]}-3"]
    assert all(run.path.is_absolute() for run in runs)


def test_create_when_it_is_there_then_kept(tmp_path: Path) -> None:
    create(tmp_path / "run").describe(command="one")
    assert create(tmp_path / "run").description() == {"command": "one"}


def test_describe_when_twice_then_fields_are_merged(tmp_path: Path) -> None:
    run = create(tmp_path)
    assert run.description() == {}
    run.describe(command=["train.py"], exit_code=None)
    run.describe(exit_code=3, path=tmp_path)
    assert run.description() == {"command": ["train.py"], "exit_code": 3, "path": str(tmp_path)}
    assert [p.name for p in tmp_path.iterdir()] == ["run.json"]


def test_events_when_written_by_many_then_each_line_is_whole(tmp_path: Path) -> None:
    run = create(tmp_path)

    def write(who: int) -> None:
        for k in range(50):
            run.append_event("step", who=who, k=k, text="x" * 500)

    threads = [threading.Thread(target=write, args=(who,)) for who in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    events = run.read_events()
    assert sorted((e.fields["who"], e.fields["k"]) for e in events) == [
        (w, k) for w in range(4) for k in range(50)
    ]
    assert {e.kind for e in events} == {"step"} and events[0].unix_time > 1_700_000_000


def test_read_when_last_line_is_cut_then_left_out(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    append_line(path, {"a": 1})
    with path.open("a") as file:
        file.write('{"a": ')
    assert list(read_lines(path)) == [{"a": 1}]
    assert list(read_lines(tmp_path / "none")) == []


def test_next_diagnosis_when_some_are_there_then_the_next_number(tmp_path: Path) -> None:
    run = create(tmp_path)
    assert run.next_diagnosis("AR251").name == "001-AR251"
    (run.diagnosis / "001-AR251.json").write_text("{}")
    (run.diagnosis / "001-AR251.md").write_text("")
    assert run.next_diagnosis("AR200").name == "002-AR200"


def test_rank_log_when_restarted_then_another_file(tmp_path: Path) -> None:
    run = create(tmp_path)
    assert [run.rank_log(3).name, run.rank_log(3, 1).name] == ["rank3.log", "rank3.1.log"]
