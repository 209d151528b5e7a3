"""Where does the build put the compiled part, and can a checkout be installed that it cannot write into?"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "hatch_build.py"


@pytest.fixture
def warned() -> list[str]:
    return []


@pytest.fixture
def build(tmp_path: Path, warned: list[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The hook for the checkout `tmp_path`, with one compiled file; hatchling and setuptools need not be installed."""
    for name, given in {
        "hatchling.builders.hooks.plugin.interface": {"BuildHookInterface": object},
        "setuptools": {"Distribution": None, "Extension": None},
        "setuptools.command.build_ext": {"build_ext": None},
    }.items():
        module = ModuleType(name)
        vars(module).update(given)
        monkeypatch.setitem(sys.modules, name, module)
    found = runpy.run_path(str(SCRIPT))
    hook = found["CustomBuildHook"]()
    hook.root, hook.app = str(tmp_path), SimpleNamespace(display_warning=warned.append)

    def compiled(source: Path, folder: str) -> list[Path]:
        built = Path(folder, "_quick.abi.so")
        built.write_text("compiled")
        return [built]

    hook.initialize.__globals__["_compiled"] = compiled
    return hook


def test_editable_when_built_then_beside_its_source(build: Any, warned: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "src/allranks/record"
    folder.mkdir(parents=True)
    build.initialize("editable", {})
    build.finalize("editable", {}, "")
    assert [p.name for p in folder.iterdir()] == ["_quick.abi.so"] and warned == []


def test_editable_when_checkout_cannot_be_written_then_installed_without(
    build: Any, warned: list[str]
) -> None:
    build.initialize("editable", {})  # not even the folder is there
    build.finalize("editable", {}, "")
    assert len(warned) == 1 and "without its compiled part" in warned[0]


def test_wheel_when_built_then_it_has_the_compiled_part_and_its_tag(build: Any, tmp_path: Path) -> None:
    data: dict[str, Any] = {"force_include": {}, "pure_python": True}
    build.initialize("standard", data)
    assert list(data["force_include"].values()) == ["allranks/record/_quick.abi.so"]
    assert (data["pure_python"], data["infer_tag"]) == (False, True)
    build.finalize("standard", data, "")
    assert not Path(next(iter(data["force_include"]))).exists()
