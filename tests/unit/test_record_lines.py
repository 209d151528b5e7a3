"""Is the user's line the one a user would point at?"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from allranks.record import lines
from allranks.record.lines import Lines, kind_of, line_of_traceback
from allranks.record.page import parse
from allranks.record.writer import Writer

USER, INSTALLED, SKIPPED = range(3)


@pytest.mark.parametrize(
    ("filename", "kind"),
    [
        ("/home/u/train.py", USER),
        ("<stdin>", USER),
        ("<ipython-input-1>", USER),
        ("<frozen runpy>", SKIPPED),
        (json.__file__, SKIPPED),
        (lines.__file__, SKIPPED),
        ("/x/lib/python3.11/site-packages/torch/nn/modules/module.py", SKIPPED),
        ("/x/lib/python3.11/site-packages/torchvision/models.py", INSTALLED),
        ("/x/lib/python3.11/site-packages/lightning/fit.py", INSTALLED),
        ("/usr/lib/python3/dist-packages/torch/x.py", SKIPPED),
    ],
)
def test_kind_when_file_then_whose_it_is(filename: str, kind: int) -> None:
    assert kind_of(filename) == kind


def run(source: str, filename: str, **names: object) -> None:
    exec(compile(source, filename, "exec"), dict(names))


def named(writer: Writer, key: int) -> str:
    writer.mark(4 | key)
    return parse(bytes(writer.buffer), "").line


def test_here_when_only_torch_is_between_then_the_line_outside() -> None:
    writer, got = Writer(), []
    found = Lines(writer)
    scope: dict = {"here": found.here, "got": got}
    exec(
        compile("def backward():\n    got.append(here(1))", "/x/site-packages/torch/_tensor.py", "exec"),
        scope,
    )
    run("def step():\n    backward()\n\nstep()\n\nstep()", "/home/u/train.py", backward=scope["backward"])
    assert [named(writer, key) for key in got] == ["/home/u/train.py:2 step"] * 2


def test_here_when_a_trainer_is_between_then_the_users_line_outside_of_it() -> None:
    writer, got = Writer(), []
    found = Lines(writer)
    scope: dict = {"here": found.here, "got": got}
    exec(compile("def fit():\n    got.append(here(1))", "/x/site-packages/trainer/fit.py", "exec"), scope)
    run("fit()\n\nfit()", "/home/u/train.py", fit=scope["fit"])
    assert [named(writer, key) for key in got] == [
        "/home/u/train.py:1 <module>",
        "/home/u/train.py:3 <module>",
    ]


MARKED = """
def marked():
    got.append(here())
def deeper():
    marked()
"""


def test_here_when_lines_and_depths_change_then_follows_them() -> None:
    writer, got = Writer(), []
    scope: dict = {"got": got, "here": Lines(writer).here}
    exec(compile(MARKED, "/x/site-packages/torch/_tensor.py", "exec"), scope)
    run(
        "marked()\nmarked()\nfor _ in range(2):\n    deeper()\nmarked()",
        "/home/u/train.py",
        marked=scope["marked"],
        deeper=scope["deeper"],
    )
    assert [named(writer, key).split(":")[1] for key in got] == [
        "1 <module>",
        "2 <module>",
        "4 <module>",
        "4 <module>",
        "5 <module>",
    ]


def test_here_when_strings_start_over_then_names_again() -> None:
    writer, got = Writer(), []
    scope: dict = {"got": got, "here": Lines(writer).here}
    scope["fill"] = lambda k: writer.string(f"{k} " + "x" * 200)
    exec(compile(MARKED, "/x/site-packages/torch/a.py", "exec"), scope)
    source = "def once():\n    marked()\nonce()\nfor k in range(200):\n    fill(k)\nonce()"
    run(source, "/home/u/train.py", marked=scope["marked"], fill=scope["fill"])
    assert got[0] != got[1]
    assert named(writer, got[1]) == "/home/u/train.py:2 once"


def test_traceback_when_raised_in_a_library_then_the_users_innermost_line() -> None:
    scope: dict = {"loads": json.loads}
    try:
        exec(compile("def read():\n    loads('{')\n\nread()", "/home/u/train.py", "exec"), scope)
    except json.JSONDecodeError:
        traceback = sys.exc_info()[2]
    assert traceback is not None
    assert line_of_traceback(traceback) == "/home/u/train.py:2 read"


def test_describe_when_path_is_relative_then_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code = compile("0", "train.py", "exec")
    assert lines.describe(code, 1) == f"{tmp_path}/train.py:1 <module>"


def test_frame_of_another_thread_when_it_goes_on_meanwhile_then_neither_of_its_places_gets_the_name_of_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names: dict[str, object] = {}
    exec(compile("def steps():\n    yield 1\n    yield 2\n", "/home/u/train.py", "exec"), names)
    made = names["steps"]()  # type: ignore[operator]
    next(made)
    describe = lines.describe

    def describe_late(*args: object) -> str:
        monkeypatch.setattr(lines, "describe", describe)
        next(made)  # as the other thread does, while this one waits for the lock
        return describe(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(lines, "describe", describe_late)
    writer = Writer()
    found = Lines(writer)
    first, second = (writer.name_of(found.of(made.gi_frame) >> 8) for _ in range(2))
    assert (first, second) == ("/home/u/train.py:2 steps", "/home/u/train.py:3 steps")


def test_line_when_no_python_called_then_none_is_known() -> None:
    assert Lines(Writer()).here(1000) == 0
