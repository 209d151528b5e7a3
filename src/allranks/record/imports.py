"""How is something done right after a module is imported, whenever that is, without importing it?"""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # as in writer.py
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType


class AfterImport:
    """A finder that finds nothing: it lets the others find, and adds to what the found loader does.

    The loader stays the object that it is (inspect, pkgutil and importlib.resources ask it things); only this one
    instance's exec_module is replaced. A loader that does not let us is left alone.
    """

    def __init__(self) -> None:
        self.before: dict[str, Callable[[], Callable[[], None]]] = {}  # gives what to call when it is over
        self.after: dict[str, Callable[[ModuleType], None]] = {}
        self._finding: set[str] = set()  # another of our kind asks this one in turn

    def install(self) -> None:
        """Become the first finder; modules that are there already get their action now."""
        for name in [name for name in self.after if name in sys.modules]:
            self.after.pop(name)(sys.modules[name])
        sys.meta_path.insert(0, self)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Called by the import system for each module that is not there yet."""
        if name not in self.after or name in self._finding:
            return None
        self._finding.add(name)
        try:
            return self._find_spec(name, path, target)
        finally:
            self._finding.discard(name)

    def _find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> ModuleSpec | None:
        spec = None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec = find(name, path, target) if find else None
            if spec is not None:
                break
        if spec is None or spec.loader is None or not hasattr(spec.loader, "exec_module"):
            return spec
        action, before = self.after[name], self.before.get(name)
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            self.after.pop(name, None)
            done = before() if before is not None else None
            try:
                execute(module)
            finally:
                if done is not None:
                    done()
            action(module)

        try:
            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        except (AttributeError, TypeError):
            return spec
        return spec
