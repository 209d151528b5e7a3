"""Where do logged values go, and in which form: lines that any JSON reader takes, TensorBoard only when needed, other trackers?"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from allranks.core.errors import AllranksWarning, UsageError
from allranks.metrics import JsonLines, Sink, default_sinks
from allranks.metrics.sinks import check_sinks, plain_value


def strict(line: str) -> dict[str, Any]:
    """Parse as a reader that knows no NaN."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(line, parse_constant=refuse)


def test_json_lines_when_values_come_then_each_line_is_there_at_once(tmp_path: Path) -> None:
    path = tmp_path / "a run" / "metrics.jsonl"
    sink = JsonLines(path)
    sink.log({"loss": 0.5, "note": "warm"}, 3)
    (first,) = path.read_text().splitlines()  # before close: a killed run keeps its lines
    assert {"step": 3, "loss": 0.5, "note": "warm"}.items() <= strict(first).items()
    sink.log({"loss": 0.25}, 4)
    sink.close()
    assert [strict(line)["step"] for line in path.read_text().splitlines()] == [3, 4]


def test_json_lines_when_the_run_goes_on_then_they_are_added(tmp_path: Path) -> None:
    for step in (1, 2):
        sink = JsonLines(tmp_path / "metrics.jsonl")
        sink.log({"loss": 1.0}, step)
        sink.close()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_json_lines_when_values_are_not_finite_then_still_json(tmp_path: Path) -> None:
    sink = JsonLines(tmp_path / "metrics.jsonl")
    nan, inf = float("nan"), float("inf")
    sink.log({"a": nan, "b": -inf, "c": [1.0, nan], "d": {"e": inf}}, 0)
    sink.close()
    found = strict((tmp_path / "metrics.jsonl").read_text())
    assert [found[n] for n in "abcd"] == ["nan", "-inf", [1.0, "nan"], {"e": "inf"}]


def test_json_lines_when_a_name_is_the_lines_own_then_neither_is_lost(tmp_path: Path) -> None:
    sink = JsonLines(tmp_path / "metrics.jsonl")
    with pytest.warns(AllranksWarning, match="as time_"):
        sink.log({"time": 12.5}, 7)
    sink.close()
    found = strict((tmp_path / "metrics.jsonl").read_text())
    assert (found["step"], found["time_"]) == (7, 12.5) and found["time"] > 1e9


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (1, 1),
        (True, True),
        ("x", "x"),
        (None, None),
        (torch.tensor(0.5, requires_grad=True), 0.5),
        (torch.tensor([[2]]), 2),
        (torch.tensor([1, 2]), [1, 2]),
        (torch.tensor([]), []),
        (torch.tensor(1.5, dtype=torch.bfloat16), 1.5),
        (np.float32(0.25), 0.25),
        (np.bool_(True), True),
        (np.array([1, 2]), [1, 2]),
        ((1, torch.tensor(2)), [1, 2]),
        ({"a": np.int64(1), 2: [torch.tensor(3.0)]}, {"a": 1, "2": [3.0]}),
        (Fraction(1, 4), 0.25),
        (Decimal("0.25"), 0.25),
    ],
)
def test_plain_value_when_it_can_be_written_then_as_python_has_it(value: Any, plain: Any) -> None:
    found = plain_value("x", value)
    assert found == plain and type(found) is type(plain)
    json.dumps(found)


@pytest.mark.parametrize(
    ("value", "kind"), [(object(), "object"), ({1, 2}, "set"), (1j, "complex"), (b"x", "bytes")]
)
def test_plain_value_when_it_cannot_be_written_then_named(value: Any, kind: str) -> None:
    with pytest.raises(UsageError, match=rf"AR162 log\(loss=...\) got a value of type {kind}\n") as caught:
        plain_value("loss", value)
    assert caught.value.code == "AR162"


def test_plain_value_when_it_is_deep_inside_then_its_place_is_named() -> None:
    with pytest.raises(UsageError, match=r"log\(loss\['a'\]=...\) got a value of type object"):
        plain_value("loss", {"a": object()})


# -- TensorBoard -------------------------------------------------------------------------------------------------------------


def test_tensorboard_when_it_is_not_installed_then_only_when_asked_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)  # import raises ImportError
    (sink,) = default_sinks(tmp_path, None)
    sink.close()
    with pytest.raises(UsageError, match="AR162 tensorboard=True, but it cannot be imported") as caught:
        default_sinks(tmp_path, True)
    assert "allranks[tensorboard]" in caught.value.fix


def test_tensorboard_when_the_installed_one_is_broken_then_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        def SummaryWriter(self, _: str) -> None:
            raise AttributeError("module 'numpy' has no attribute 'bool8'")

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", Broken())
    with pytest.warns(AllranksWarning, match="bool8.*tensorboard=False"):
        (sink,) = default_sinks(tmp_path, None)
    sink.close()


def test_tensorboard_when_not_wanted_then_not_even_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    (sink,) = default_sinks(tmp_path, False)
    sink.close()


def test_tensorboard_when_values_come_then_numbers_are_scalars_and_text_is_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[Any, ...]] = []

    class Writer:
        def __init__(self, folder: str, purge_step: int | None = None) -> None:
            calls.append(("open", Path(folder).name, purge_step))

        def add_scalar(self, *what: Any) -> None:
            calls.append(("scalar", *what))

        def add_text(self, *what: Any) -> None:
            calls.append(("text", *what))

        def close(self) -> None:
            calls.append(("close",))

    class Module:
        SummaryWriter = Writer

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", Module())
    lines, board = default_sinks(tmp_path, True, resumed_at=8)
    board.log({"loss": 0.5, "note": "x", "list": [1, 2], "none": None}, 9)
    board.close()
    lines.close()
    assert calls == [
        ("open", "tensorboard", 9),
        ("scalar", "loss", 0.5, 9),
        ("text", "note", "x", 9),
        ("close",),
    ]


@pytest.mark.parametrize(
    ("keep", "logged_since", "left"), [(1, 0, [1]), (1, 2, [1, 8, 8]), (5, 1, [1, 2, 3, 8])]
)
def test_cut_back_then_lines_of_before_go_and_own_ones_stay(
    tmp_path: Path, keep: int, logged_since: int, left: list[int]
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {n}}}\n' for n in (1, 2, 3)) + '{"step": 4, "half')
    sink = JsonLines(path)
    for _ in range(logged_since):
        sink.log({}, 8)
    cut = sink.cut_back(keep)
    sink.log({}, 9)
    sink.close()
    lines = path.read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines if "half" not in line] == [*left, 9]
    assert cut == max(0, 4 - keep) and sink.count == len(lines)


# -- other trackers ----------------------------------------------------------------------------------------------------------


class Tracker:
    """Two methods make a tracker; nothing to inherit."""

    def log(self, values: Mapping[str, Any], step: int) -> None: ...

    def close(self) -> None: ...


def test_sink_when_it_has_both_methods_then_it_is_one() -> None:
    assert isinstance(Tracker(), Sink)
    check_sinks((Tracker(),))


@pytest.mark.parametrize(
    ("sink", "what"),
    [(print, "it has no log and no close"), (Tracker, "it is a class, not an object")],
)
def test_sink_when_it_is_none_then_said_before_the_training(sink: Any, what: str) -> None:
    with pytest.raises(UsageError, match=what) as caught:
        check_sinks((sink,))
    assert caught.value.code == "AR162"
