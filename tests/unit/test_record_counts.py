"""Does what is compiled do what the Python marks do: count, pass on, and leave everything else to them?"""

from __future__ import annotations

import functools
import gc
import inspect
import mmap
import os
import pickle
import subprocess
import sys
import sysconfig
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest

from allranks import record
from allranks.record import counts
from support.needs import need, need_commands

compiled = pytest.mark.skipif(not counts.IS_COMPILED, reason="the extension is not compiled here")
has_fronts = pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="only CPython 3.11 needs them")
HERE = __name__


def original(*args: Any, **kwargs: Any) -> Any:
    """What torch would do."""
    return args, kwargs


def _light() -> Any:
    light: Any = counts.Counts()
    counted, asked = "step micro_steps syncs drawn", "asked_step asked_ns ask_every"
    for name in f"{counted} until until_syncs model iterator optimizer data_key {asked}".split():
        setattr(light, name, 0)
    light.ask_at = 1 << 40
    light.is_on, light.is_hook_counted, light.optimizers = True, True, {}
    light.step_words = memoryview(bytearray(16)).cast("q")
    light.drawn_word = memoryview(bytearray(8)).cast("q")
    return light


class Job:
    """A mark around `original`, and what was called."""

    def __init__(self, kind: int, does: Callable[..., Any] = original) -> None:
        self.light, self.called, self.is_enabled = _light(), [], True

        @functools.wraps(does)
        def mark(*args: Any, **kwargs: Any) -> Any:
            self.called.append("python")
            return does(*args, **kwargs)

        self.python = mark
        self.mark = counts.quicken(
            mark, kind, self.light, does, self._failed, lambda: self.called.append("resume"),
            is_grad_enabled=lambda: self.is_enabled, unsynchronised=lambda: self.called.append("unsynchronised"),
        )  # fmt: skip

    def _failed(self, error: BaseException, first: Any) -> None:
        self.called.append((type(error).__name__, first))


class Model:
    """As DDP has it."""

    require_backward_grad_sync = True


@pytest.mark.skipif(bool(os.environ.get("ALLRANKS_NO_EXTENSION")), reason="it is not wanted")
def test_extension_when_there_is_a_compiler_then_it_was_built() -> None:
    need("a Python without a GIL counts in Python", not sysconfig.get_config_var("Py_GIL_DISABLED"))
    need("needs the headers of Python", Path(sysconfig.get_paths()["include"], "Python.h").exists())
    need_commands("gcc")
    assert counts.IS_COMPILED, "pip install -e . compiles it"


@compiled
def test_extension_when_of_another_version_then_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for version, is_used in ((counts.VERSION, True), (counts.VERSION - 1, False)):
        monkeypatch.setattr(record, "_quick", SimpleNamespace(VERSION=version), raising=False)
        assert (counts._extension() is not None) == is_used


@compiled
def test_forward_when_light_then_counted_without_python() -> None:
    job, model = Job(counts.FORWARD), Model()
    job.light.model = id(model)
    assert job.mark(model, 1, two=2) == ((model, 1), {"two": 2})
    assert job.mark(*(model, 1), two=2) == ((model, 1), {"two": 2})
    # CPython 3.11 runs the Python function where Python calls it by its name; torch calls forward from C.
    by_name = ["python"] if sys.version_info[:2] == (3, 11) else []
    assert job.called == by_name
    assert (job.light.micro_steps, job.light.syncs) == (2 - len(by_name),) * 2
    assert job.light.step_words[1] == job.light.micro_steps


@compiled
@pytest.mark.parametrize("case", ["whole", "another model", "evaluation"])
def test_forward_when_its_marks_are_not_light_then_python_does_it(case: str) -> None:
    job, model = Job(counts.FORWARD), Model()
    job.light.model = id(model)
    if case == "whole":
        job.light.is_on = False
    elif case == "evaluation":
        job.is_enabled = False
    else:
        job.light.model = 1
    assert job.mark(*(model,)) == ((model,), {})
    assert job.called == ["python"] and job.light.micro_steps == 0


@compiled
def test_forward_when_its_backward_does_not_average_then_it_is_said() -> None:
    job, model = Job(counts.FORWARD), Model()
    job.light.model, model.require_backward_grad_sync = id(model), False
    job.mark(*(model,))
    assert job.called == ["unsynchronised"] and (job.light.micro_steps, job.light.syncs) == (1, 0)


@compiled
@pytest.mark.parametrize("kind", [counts.FORWARD, counts.BACKWARD, counts.NEXT_BATCH])
def test_mark_when_what_it_marks_raises_then_its_error_goes_on(kind: int) -> None:
    def fails(first: Any) -> None:
        job.light.is_on = False  # the tick thread
        raise KeyError("mine")

    job = Job(kind, fails)
    job.light.model = job.light.iterator = id(job)
    with pytest.raises(KeyError, match="mine") as caught:
        job.mark(*(job,))
    assert job.called == [("KeyError", job), "resume"]
    assert [t.name for t in caught.traceback] == [
        "test_mark_when_what_it_marks_raises_then_its_error_goes_on",
        "fails",
    ]
    assert (job.light.micro_steps, job.light.drawn) == (0, 0)


@compiled
@pytest.mark.parametrize(
    ("ours", "goes_on"), [(RuntimeError, KeyError), (KeyboardInterrupt, KeyboardInterrupt)]
)
@pytest.mark.parametrize("where", ["failed", "resume"])
def test_mark_when_what_is_told_of_an_error_fails_then_the_users_error_goes_on(
    where: str, ours: type[BaseException], goes_on: type[BaseException]
) -> None:
    def fails(first: Any) -> None:
        light.is_on = where == "failed"
        raise KeyError("mine")

    def told(*_: Any) -> None:
        raise ours  # a Ctrl-C must not be lost

    light = _light()
    parts = (told, lambda: None) if where == "failed" else (lambda *_: None, told)
    mark = counts.quicken(lambda first: None, counts.BACKWARD, light, fails, *parts)
    for _ in range(100):
        light.is_on = True
        with pytest.raises(goes_on):
            mark(*(1,))


@compiled
@pytest.mark.parametrize("kind", [counts.FORWARD, counts.BACKWARD, counts.NEXT_BATCH])
def test_mark_when_light_marks_end_during_the_call_then_resumed_and_counted(kind: int) -> None:
    def lasts(first: Any) -> str:
        job.light.is_on = False
        return "done"

    job, model = Job(kind, lasts), Model()
    job.light.model = job.light.iterator = id(model)
    assert job.mark(*(model,)) == "done"
    assert job.called == ["resume"]
    assert job.light.micro_steps == (kind == counts.FORWARD) and job.light.drawn == (
        kind == counts.NEXT_BATCH
    )


@compiled
def test_next_batch_when_light_then_counted_and_its_end_told() -> None:
    class Batches:
        def __init__(self) -> None:
            self.left = iter([1, 2])

        def __iter__(self) -> Batches:
            return self

    job = Job(counts.NEXT_BATCH, lambda self: next(self.left))
    Batches.__next__ = job.mark  # type: ignore[attr-defined]
    batches = Batches()
    job.light.iterator = id(batches)
    assert list(batches) == [1, 2]  # type: ignore[call-overload]
    assert job.light.drawn == job.light.drawn_word[0] == 2 and job.called == [("StopIteration", batches)]


@compiled
def test_mark_when_called_often_then_nothing_is_kept() -> None:
    job, model, given = Job(counts.FORWARD, lambda model, given: given), Model(), object()
    job.light.model = id(model)
    before = sys.getrefcount(model), sys.getrefcount(given), sys.getrefcount(None)
    for _ in range(3000):
        job.mark(*(model, given))
    assert job.light.micro_steps == 3000
    after = sys.getrefcount(model), sys.getrefcount(given), sys.getrefcount(None)
    assert all(abs(now - then) < 100 for then, now in zip(before, after, strict=True))


@compiled
def test_quicken_when_given_what_is_no_mark_then_an_error() -> None:
    light = _light()
    with pytest.raises(TypeError):
        counts.quicken(len, counts.FORWARD, light, len, print, print)
    with pytest.raises(TypeError):
        counts.quicken(lambda: None, counts.FORWARD, object(), len, print, print)
    with pytest.raises(ValueError, match="no kind 7"):
        counts.quicken(lambda: None, 7, light, len, print, print)


def backward(tensors: Any, inputs: Any = None) -> Any:
    """Takes the place of torch's."""
    return tensors, inputs


@compiled
@has_fronts
def test_front_when_asked_then_it_is_the_function() -> None:
    job = Job(counts.BACKWARD, backward)
    front: Any = job.mark
    assert not isinstance(front, FunctionType) and front(1, inputs=2) == (1, 2) and job.called == []
    assert inspect.signature(front) == inspect.signature(backward) and inspect.getsource(front).startswith(
        "def backward"
    )
    assert (front.__name__, front.__module__, front.__doc__) == (
        "backward",
        HERE,
        "Takes the place of torch's.",
    )
    assert front.__code__ is job.python.__code__ and repr(front) == repr(job.python)
    front.note = 1
    assert job.python.note == 1  # type: ignore[attr-defined]
    assert front.__get__(3, int)() == (3, None) and weakref.ref(front)() is front
    globals()["backward"], kept = front, backward
    try:
        assert pickle.loads(pickle.dumps(front)) is front
    finally:
        globals()["backward"] = kept
    job.light.is_on = False
    assert front(1) == (1, None) and job.called == ["python"]
    with pytest.raises(AttributeError):
        _ = front.nothing


class Optimizer:
    """Anything."""


def _hooks(light: Any) -> tuple[list[str], Callable[..., None], Callable[..., None]]:
    called: list[str] = []
    enter, leave = counts.hooks(light, lambda *_: called.append("enter"), lambda *_: called.append("leave"))
    return called, lambda o: enter(o, (), {}), lambda o: leave(o, (), {})


@compiled
@pytest.mark.parametrize("how", ["last", "known"])
def test_hooks_when_light_then_the_step_is_counted_in_the_page(how: str) -> None:
    light, optimizer = _light(), Optimizer()
    light.until = light.until_syncs = 10
    light.micro_steps = light.step_words[1] = 4
    if how == "last":
        light.optimizer = id(optimizer)
    else:
        light.optimizers[id(optimizer)] = True
    called, enter, leave = _hooks(light)
    enter(optimizer)
    leave(optimizer)
    assert called == [] and (light.step, [*light.step_words], light.micro_steps) == (1, [1, 0], 0)
    light.is_hook_counted = False  # the library counts
    leave(optimizer)
    assert called == [] and (light.step, light.step_words[0]) == (1, 1)


@compiled
@pytest.mark.parametrize(("step_ms", "is_quick"), [(1.0, True), (3.0, True), (60.0, False)])
def test_hooks_when_it_is_asked_whether_steps_are_quick_then_python_is_told_if_they_are_not(
    step_ms: float, is_quick: bool
) -> None:
    light, optimizer = _light(), Optimizer()
    light.until = light.until_syncs = 1000
    light.optimizer = id(optimizer)
    light.step, light.asked_step, light.ask_at, light.ask_every = 163, 100, 164, 64
    light.asked_ns = before = time.monotonic_ns() - int(64 * step_ms * 1e6)
    called, _, leave = _hooks(light)
    leave(optimizer)
    if is_quick:
        assert called == [] and (light.step, light.asked_step, light.ask_at, light.until) == (
            164,
            164,
            228,
            1000,
        )
        assert before + 64 * int(step_ms * 1e6) <= light.asked_ns <= time.monotonic_ns()
    else:
        assert called == ["leave"] and (light.step, light.asked_step, light.ask_at, light.until) == (
            163,
            100,
            0,
            164,
        )
    light.step, light.ask_at, light.is_hook_counted = 300, 200, False  # the library counts
    leave(optimizer)
    assert light.ask_at == 200


@compiled
@pytest.mark.parametrize("case", ["whole", "unknown", "inner", "step due", "compared", "no page"])
def test_hooks_when_there_is_more_to_do_then_python_does_it(case: str) -> None:
    light, optimizer = _light(), Optimizer()
    light.until = light.until_syncs = 10
    light.optimizer, light.is_on = 0 if case in ("unknown", "inner") else id(optimizer), case != "whole"
    if case == "inner":
        light.optimizers[id(optimizer)] = False
    light.until = 1 if case == "step due" else 10
    light.until_syncs = 0 if case == "compared" else 10
    if case == "no page":
        light.step_words = memoryview(b"")
    called, enter, leave = _hooks(light)
    enter(optimizer)
    leave(optimizer)
    only_end = case in ("step due", "compared", "no page")
    assert called == (["leave"] if only_end else ["enter", "leave"]) and light.step == 0


@compiled
def test_hooks_when_python_raises_then_so_do_they() -> None:
    def fails(*_: Any) -> None:
        raise KeyError("mine")

    enter, leave = counts.hooks(_light(), fails, fails)
    for hook in (enter, leave):
        with pytest.raises(KeyError, match="mine"):
            hook(Optimizer(), (), {})
    assert enter.__module__.startswith("allranks.")  # as quick optimizers ask


@compiled
def test_counts_when_given_another_page_then_the_old_one_can_be_closed() -> None:
    page = mmap.mmap(-1, 4096)
    light = _light()
    words = memoryview(page).cast("q")
    light.step_words, light.drawn_word = words[3:5], words[9:10]
    assert light.step_words.nbytes == 16
    light.step_words = light.drawn_word = memoryview(bytearray(16)).cast("q")
    words.release()
    page.close()
    kept = weakref.ref(light.optimizers.setdefault("owner", Optimizer()))
    light.optimizers["itself"] = light
    del light
    gc.collect()
    assert kept() is None


@compiled
def test_counts_when_in_a_cycle_with_an_older_page_then_collected() -> None:
    # Older: it is cleared first, and so crashed CPython before 3.13.
    word = memoryview(bytearray(24)).cast("q")[1:]
    light = _light()
    light.step_words = word
    kept = weakref.ref(light.optimizers.setdefault("owner", Optimizer()))
    light.optimizers["itself"] = light
    del light, word
    gc.collect()
    assert kept() is None


MODULES = ("light", "optimizers", "loaders", "counts")


@compiled
def test_record_when_nothing_is_compiled_then_its_tests_pass_too() -> None:
    files = [f"{os.path.dirname(__file__)}/test_record_{name}.py" for name in MODULES]  # noqa: PTH120
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rs", *files]
    done = subprocess.run(
        command, env={**os.environ, "ALLRANKS_NO_EXTENSION": "1"}, capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    assert "the extension is not compiled here" in done.stdout
