"""How is src/allranks/record/_quick.c built? By setuptools, which knows every platform's compiler; without one, allranks is pure Python."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from setuptools import Distribution, Extension
from setuptools.command.build_ext import build_ext

SOURCE = "src/allranks/record/_quick.c"


class CustomBuildHook(BuildHookInterface):
    """Compiles the extension for the Python that builds: beside its source for an editable install, else into the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        self._folder = tempfile.TemporaryDirectory()  # until the wheel is written
        source = Path(self.root, SOURCE)
        for built in _compiled(source, self._folder.name):
            if version == "editable":
                try:
                    new = Path(shutil.copy(built, source.with_suffix(".new")))
                    # In one go: a process may have the old one mapped.
                    new.replace(source.with_name(built.name))
                except OSError as error:  # a checkout that can only be read
                    self.app.display_warning(f"allranks goes without its compiled part: {error}")
            else:
                build_data["force_include"][str(built)] = f"allranks/record/{built.name}"
                build_data["pure_python"], build_data["infer_tag"] = False, True

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        self._folder.cleanup()


def _compiled(source: Path, folder: str) -> list[Path]:
    """The extension; nothing if it cannot be compiled, which setuptools says."""
    extension = Extension(source.stem, [str(source)], optional=True)
    command = build_ext(Distribution({"name": "allranks", "ext_modules": [extension]}))
    command.build_lib = command.build_temp = folder
    command.ensure_finalized()
    command.run()
    return [Path(path) for path in command.get_outputs() if Path(path).exists()]
