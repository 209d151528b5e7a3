"""Are only those values read out of a rank that its guilty line depends on, and no secrets?"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from allranks.watch import peeking, source
from allranks.watch.decide import decide
from allranks.watch.evidence import Call, Evidence, Rank, Record, Stack
from allranks.watch.observed import Value
from allranks.watch.peeking import names_in, plain, values_of, with_values
from allranks.watch.verdict import Place

SCRIPT = """\
def main():
    for step in range(1000):
        loss.backward()
        if val_loss < best and not api_token:
            dist.broadcast(weights, src=0)
        if bad > patience:
            break
    dist.barrier()
"""


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("if val_loss < kept:  # better", ("val_loss", "kept")),
        ("elif self.best > len(scores) and done is not None:", ("self", "scores", "done")),
        ("if api_key == key or user_password or AUTH:", ()),
        ("for state in states:", ("state", "states")),
        ('if mode == "train":', ("mode",)),
        ("while int(x) % 2:", ("x",)),
        ("if (a and", ("a",)),
        ("", ()),
    ],
)
def test_names_when_a_line_is_read_then_its_variables_and_nothing_that_sounds_secret(
    code: str, names: tuple[str, ...]
) -> None:
    assert names_in(code) in (names, ())
    assert names_in(code) == names or code == "if (a and"  # a line of several: nothing may be known


@pytest.mark.parametrize(
    "text", ["0.31", "-3", "1e-05", "True", "None", "nan", '"train"', "[1, 2, 3]", "(3, 4)", '["a", "b"]']
)
def test_value_when_it_is_a_number_or_a_text_then_it_is_told(text: str) -> None:
    assert plain(text) == text


@pytest.mark.parametrize(
    "text", ["<Tensor at 0x7faf>", '{"password": 1}', "[<A at 0x1>]", "", "module.Class"]
)
def test_value_when_it_is_an_object_then_nothing_is_told(text: str) -> None:
    assert plain(text) == ""


@pytest.mark.parametrize(
    "text",
    [
        '"https://ann:hunter2@example.org/runs"',
        '"sk-4f9aA81c77e0b2d39f61c7aa"',
        '["ok", "8d7f6a5b4c3d2e1f0a9b8c7d6e5f"]',
    ],
)
def test_value_when_it_looks_like_a_secret_then_nothing_is_told(text: str) -> None:
    assert plain(text) == ""
    assert plain('"/home/ann/checkpoints/best_of_epoch_12/model"') != ""
    assert names_in("if pw != db_pw and pwned and session_cookie and power:") == ("pwned", "power")


def test_value_when_it_is_long_then_cut() -> None:
    assert len(plain('"' + 200 * "x" + '"')) == peeking.MOST_CHARACTERS


def dumped(pid: int, file: str, function: str, **values: str) -> str:
    """What py-spy prints of a process that stands in a function."""
    known = [{"name": n, "addr": 1, "arg": False, "repr": r} for n, r in values.items()]
    frames = [
        {"name": "wait", "filename": "/x/torch.py", "line": 1, "locals": []},
        {"name": function, "filename": file, "line": 5, "locals": known},
    ]
    other = {"pid": pid, "os_thread_id": pid + 1, "frames": [{"name": function, "filename": file, "line": 1}]}
    return json.dumps(
        [other, {"pid": pid, "os_thread_id": pid, "thread_name": "MainThread", "frames": frames}]
    )


def test_values_when_a_process_was_read_then_of_the_function_on_its_main_thread() -> None:
    place = Place("/a/train.py", 4, "main", "if val_loss < best:")
    text = dumped(7, "/a/train.py", "main", val_loss="0.31", best="<Tensor at 0x1>", other="1")
    assert values_of(text, place, ("val_loss", "best")) == [Value(4, "val_loss", "0.31")]
    assert values_of(text, replace(place, function="other"), ("val_loss",)) == []
    assert values_of("", place, ("val_loss",)) == []


def job(file: Path) -> Evidence:
    """Rank 0 is in the broadcast under the `if`, rank 1 in the backward of its next step."""
    at = Place(str(file), 5, "main", "dist.broadcast(weights, src=0)")
    backward = replace(at, line=3, code="loss.backward()")
    call = Call("broadcast", seq=4, root=0, shape=(2,), numel=2, where=at, age_s=1.2, is_inside=True)
    one = Record(step=4, phase="collective", phase_s=1.2, median_step_s=0.01, calls=(call,), group_seq=4)
    two = Record(step=5, phase="backward", phase_s=1.2, median_step_s=0.01, group_seq=5, where=backward)
    engine = Place("/x/torch/autograd/graph.py", 1, "_engine_run_backward")
    stacks = [(Stack(frames, is_main=True),) for frames in ((at,), (engine, backward))]
    condition = Place(str(file), 4, "main", "if val_loss < best and not api_token:")
    ranks = (
        Rank(0, "gpu-a", pid=100, state="S", record=one, stacks=stacks[0], condition=condition),
        Rank(1, "gpu-a", pid=101, state="S", record=two, stacks=stacks[1]),
        Rank(2, "gpu-b", node_rank=1, pid=100, state="S", record=two, stacks=stacks[1]),
    )
    return Evidence(world_size=3, ranks=ranks, trigger="waiting")


def test_verdict_when_a_condition_parts_the_ranks_then_its_values_on_the_ranks_of_this_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "train.py"
    file.write_text(SCRIPT)
    asked: list[int] = []

    def read(pid: int, within_s: float, *options: str) -> str:
        asked.append(pid)
        assert options == ("--locals",)
        return dumped(pid, str(file), "main", val_loss=str(pid / 100), best="1.005", api_token='"s3cret"')

    monkeypatch.setattr(peeking, "py_spy", read)
    evidence = job(file)
    verdict = decide(evidence)
    assert verdict is not None and verdict.code == "AR250"
    more, said = with_values(evidence, verdict, node_rank=0)
    assert sorted(asked) == [100, 101]
    facts = "\n".join(said.facts)
    assert (
        "values there now: rank 0: val_loss = 1.0, best = 1.005; rank 1: val_loss = 1.01, best = 1.005"
        in facts
    )
    assert "s3cret" not in json.dumps(more.to_json())


def test_verdict_when_nothing_can_be_read_then_it_is_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peeking, "py_spy", lambda *args: "")
    evidence = job(tmp_path / "train.py")
    verdict = decide(evidence)
    assert verdict is not None
    assert with_values(evidence, verdict, 0) == (evidence, verdict)


def test_source_when_a_line_is_asked_for_then_its_condition_and_the_ways_out_of_a_loop() -> None:
    assert [source.condition(SCRIPT, n) for n in (3, 5, 7, 8)] == [None, 4, 6, None]
    assert source.ways_out(SCRIPT, 2, 7) == [6]
    assert source.ways_out("for (", 1, 2) == [] and source.condition("if (", 1) is None


def test_source_when_a_line_is_in_an_except_or_finally_then_it_is_known() -> None:
    text = "try:\n    a()\nexcept E:\n    b()\nelse:\n    c()\nfinally:\n    d()\ne()\n"
    assert [source.is_cleanup(text, n) for n in (2, 4, 6, 8, 9)] == [False, True, False, True, False]
    assert not source.is_cleanup("try:", 1)
