"""Is an action done once after an import, and is the import as it was?"""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path

import pytest

from allranks.record import probe, startup
from allranks.record.imports import AfterImport


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    folder = tmp_path / "record_sample"
    folder.mkdir()
    (folder / "__init__.py").write_text("from record_sample.part import value\n")
    (folder / "part.py").write_text("value = 1\n\ndef f():\n    return value\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    for name in ("record_sample", "record_sample.part"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return "record_sample"


def test_action_when_imported_then_before_others_take_the_names(package: str) -> None:
    hook, done = AfterImport(), []
    hook.after["record_sample.part"] = lambda module: setattr(module, "value", 2)
    hook.before["record_sample.part"] = lambda: done.append("before") or (lambda: done.append("over"))
    hook.install()
    module = importlib.import_module(package)
    assert module.value == 2
    assert done == ["before", "over"]
    part = sys.modules["record_sample.part"]
    assert "return value" in inspect.getsource(part.f)
    assert type(part.__spec__.loader).__name__ == "SourceFileLoader"  # type: ignore[union-attr]


def test_action_when_already_imported_then_now_and_once(package: str) -> None:
    importlib.import_module(package)
    hook, seen = AfterImport(), []
    hook.after["record_sample.part"] = seen.append
    hook.install()
    importlib.reload(sys.modules["record_sample.part"])
    assert len(seen) == 1


def test_import_when_it_fails_then_the_error_is_its_own(package: str, tmp_path: Path) -> None:
    (tmp_path / "record_sample" / "part.py").write_text("raise KeyError('mine')\n")
    hook, done = AfterImport(), []
    hook.after["record_sample.part"] = done.append
    hook.before["record_sample.part"] = lambda: lambda: done.append("over")
    hook.install()
    with pytest.raises(KeyError, match="mine"):
        importlib.import_module(package)
    assert done == ["over"]


def test_marks_when_listed_at_start_then_each_has_its_function() -> None:
    assert set(startup._MARKED) == set(probe.MARKS)
