"""Is each error noted once that comes out of what is marked into the user's code, in quick steps, too?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from allranks.record import layout as at
from allranks.record import notes, probe_loaders, process, states, thrown
from allranks.record.writer import Writer


@pytest.fixture
def noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[dict[str, Any]]]]:
    monkeypatch.setattr(process, "side_path", lambda suffix: str(tmp_path / f"7{suffix}"))
    notes._counts.clear()
    thrown._after_fork()
    yield lambda: list(notes.read_notes(str(tmp_path / f"7{at.SUFFIX}")))
    notes._counts.clear()


def fail(message: str = "sample 61 is broken") -> None:
    raise ValueError(message)


def test_error_when_it_passes_two_marks_then_noted_once_with_its_lines(noted: Any) -> None:
    try:
        fail()
    except ValueError as error:
        states.raised(error, "all_reduce")
        states.raised(error, "backward")
    (one,) = noted()
    assert (one["kind"], one["names"], one["text"]) == (
        thrown.KIND,
        ["ValueError", "Exception"],
        "sample 61 is broken",
    )
    assert (one["what"], one["step"]) == ("all_reduce", process.WRITER.step)
    assert one["at"].endswith(f"{Path(__file__).name}:{fail.__code__.co_firstlineno + 1} fail")
    assert one["lines"][0].endswith(" test_error_when_it_passes_two_marks_then_noted_once_with_its_lines")
    assert len(one["lines"]) <= thrown.MAX_LINES


def test_error_when_it_comes_again_later_then_noted_again(
    noted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "WRITER", record := Writer())
    for _ in range(2):
        record.light.step += 1
        thrown.note(ValueError("x"), "forward")
    assert [n["step"] for n in noted()] == [1, 2]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1), GeneratorExit()])
def test_end_of_the_program_then_not_noted(noted: Any, error: BaseException) -> None:
    thrown.note(error, "forward")
    assert noted() == []


def test_error_of_a_loader_worker_then_its_last_line(noted: Any) -> None:
    text = "Caught ValueError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\nValueError: sample 61"
    thrown.note(ValueError(text), "the next batch")
    assert [n["text"] for n in noted()] == ["ValueError: sample 61"]


@pytest.mark.parametrize("is_light", [True, False])
def test_batch_when_it_raises_then_noted_and_its_end_is_not(
    noted: Any, monkeypatch: pytest.MonkeyPatch, is_light: bool
) -> None:
    monkeypatch.setattr(process, "WRITER", record := Writer())
    monkeypatch.setattr(probe_loaders, "_writer", record)
    monkeypatch.setattr(probe_loaders, "_light", record.light)

    class Batches:
        left = 1

        def __next__(self) -> Any:
            self.left -= 1
            if self.left < 0:
                raise StopIteration
            return fail()

    class Loader:
        num_workers = 0

    batches: Any = Batches()
    batches._allranks_pass = probe_loaders.Pass(Loader(), 0)
    draw = probe_loaders._marked_next(Batches.__next__)
    record.mark(at.PYTHON)
    record.next_looked, record.may_be_light = 1 << 40 if is_light else 1, is_light
    record.end_step()
    record.light.iterator = id(batches) if is_light else 0
    assert record.light.is_on is is_light
    with pytest.raises(ValueError, match="61"):
        draw(batches)
    with pytest.raises(StopIteration):
        draw(batches)
    assert [(n["what"], n["step"]) for n in noted()] == [("the next batch", 1)]
